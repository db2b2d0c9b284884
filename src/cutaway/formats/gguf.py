"""GGUF, the single-file container of llama.cpp: metadata, tensor table, tensor bytes.

::

    "GGUF"  u32 version (2 or 3)  u64 n_tensors  u64 n_kv
    n_kv      key/values                       `cutaway.formats.gguf_kv`
    n_tensors name, u32 n_dims, u64 dims[] (fastest first), u32 type, u64 offset
    padding to general.alignment, then each tensor, padded likewise

Everything is checked against the file's size before it is believed.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from cutaway.errors import DtypeError, FormatError, LimitExceeded, ShapeMismatch, TruncatedError
from cutaway.formats.ahead import Ahead
from cutaway.formats.files import (
    Progress,
    StrPath,
    empty_bytes,
    map_private,
    nonfinite,
    open_regular,
    read_head,
    read_into,
    refuse_foreign,
)
from cutaway.formats.gguf_kv import Cursor, GgufValue, read_metadata
from cutaway.formats.quants import BlockType, block_type, chunk_blocks, dequantise_blocks

__all__ = ["GgufFile", "GgufTensor", "GgufValue"]

MAX_KEYS = 65_536
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_NAME = 63  # bytes; ggml's own limit
_SMALLEST_KEY = 8 + 1 + 4 + 1  # bytes
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
_TENSOR_MEMORY = 500  # bytes that an entry of the table takes here


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: ``offset`` bytes into the file, ``nbytes`` long.

    ``shape`` is row-major as in torch, the reverse of ggml's dims; its last axis is cut into blocks.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


class GgufFile:
    """A little-endian GGUF file, version 2 or 3, whose tables have been checked against its size.

    ``metadata`` holds the key/values, ``tensors`` the table in the file's order. Bytes are read
    into private memory; ``mmap=True`` maps them instead, and then a file cut short under us
    kills the process. ``max_name`` is the longest tensor name in bytes.

    Errors: FormatError and its kinds, naming key or tensor; ShapeMismatch for dims that cannot be.
    """

    def __init__(self, path: StrPath, *, mmap: bool = False, max_name: int = MAX_NAME) -> None:
        self.path = os.fspath(path)
        self._ahead: Ahead | None = None
        self._file = open_regular(path)
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            cursor = Cursor(self._file, self.size, self.path)
            n_tensors, n_keys = self._counts(cursor)
            self.metadata, self._types = read_metadata(cursor, n_keys)
            self.alignment = self._alignment()
            self.tensors = self._table(cursor, n_tensors, max_name)
            self._map = torch.from_numpy(map_private(self._file, path)) if mmap else None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Tensors already read stay valid, mapped ones too."""
        if self._ahead is not None:
            self._ahead.stop()
        self._file.close()
        self._map = None

    def type_of(self, key: str) -> str:
        """The declared type of a value: ``"u32"``, ``"f32"``, ``"str"``, ``"arr[f32]"``. FormatError if absent."""
        if key not in self._types:
            raise FormatError("metadata is missing", path=self.path, field=key)
        return self._types[key]

    def names(self) -> list[str]:
        """The tensors, in the file's order."""
        return list(self.tensors)

    def info(self, name: str) -> GgufTensor:
        """Type, shape and place of a tensor. ShapeMismatch if the file has none of this name."""
        if name not in self.tensors:
            raise ShapeMismatch("tensor is missing", path=self.path, field=name)
        return self.tensors[name]

    def read_ahead(self, names: Iterable[str]) -> None:
        """Begin, once, to read tensors that will be asked for as they are stored, beside what the caller does."""
        if self._map is None and self._ahead is None:
            places = [(name, self.info(name).offset, self.info(name).nbytes) for name in names]
            self._ahead = Ahead(self._file.fileno(), places, path=self.path)

    def raw(self, name: str, *, progress: Progress | None = None) -> npt.NDArray[np.uint8]:
        """The stored bytes, uint8 [rows, bytes per row], rows being all axes but the last."""
        info = self.info(name)
        return self._bytes(info, progress).numpy().reshape(-1, info.type.row_bytes(info.shape[-1]))

    def read(self, name: str, dtype: torch.dtype = torch.float32, *, progress: Progress | None = None) -> torch.Tensor:
        """One tensor as plain numbers. ``progress`` is told the bytes just read.

        A type stored as such comes back bit for bit; blocks are taken apart in float32, some at
        a time, so that nothing else as large as the result is in memory.
        """
        info = self.info(name)
        kind = info.type
        if kind.dtype is dtype:
            return self._bytes(info, progress).view(dtype).view(info.shape)
        out = empty_bytes(info.numel * dtype.itemsize, path=self.path, field=name).view(dtype)
        rows = out.view(-1, kind.block)
        step = min(chunk_blocks(kind), len(rows))
        direct = dtype is torch.float32 or kind.dtype is not None
        floats = None if direct else torch.empty(step, kind.block)
        stage = np.empty((step, kind.nbytes), np.uint8)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            offset = info.offset + start * kind.nbytes
            if self._map is None:
                read_into(self._file, offset, stage[: len(part)], path=self.path, field=name, progress=progress)
                blocks = torch.from_numpy(stage[: len(part)])
            else:
                blocks = self._map[offset : offset + len(part) * kind.nbytes].view(-1, kind.nbytes)
                if progress is not None:
                    progress(blocks.numel())
            if floats is None:
                dequantise_blocks(blocks, kind, part)
            else:
                dequantise_blocks(blocks, kind, floats[: len(part)])
                part.copy_(floats[: len(part)])
        return out.view(info.shape)

    def count_nonfinite(self) -> dict[str, int]:
        """How many weights of each tensor are NaN or infinite; tensors without any are left out."""
        counts = {name: nonfinite(self.read(name)) for name in self.tensors}
        return {name: count for name, count in counts.items() if count}

    def _bytes(self, info: GgufTensor, progress: Progress | None) -> torch.Tensor:
        if self._map is not None:
            if progress is not None:
                progress(info.nbytes)
            return self._map[info.offset : info.offset + info.nbytes]
        data = None if self._ahead is None else self._ahead.take(info.name)
        if data is not None:
            if progress is not None:
                progress(info.nbytes)
            return data
        data = empty_bytes(info.nbytes, path=self.path, field=info.name)
        read_into(self._file, info.offset, data.numpy(), path=self.path, field=info.name, progress=progress)
        return data

    # -- the tables --------------------------------------------------------------------------

    def _counts(self, cursor: Cursor) -> tuple[int, int]:
        head = read_head(self._file, self.path)
        if not head.startswith(b"GGUF"):
            refuse_foreign(head, path=self.path, wanted="gguf")
            if b"GGUF".startswith(head[:4]):
                raise TruncatedError("ends early", path=self.path, field="magic", expected="GGUF", got=head)
            hint = "a big-endian or older file; convert the model again" if head[:4] in _OLD else None
            raise FormatError("is not GGUF", path=self.path, field="magic", offset=0, got=head[:4], hint=hint)
        cursor.number("I", "magic")
        version = cursor.number("I", "version")
        if version and version & 0xFFFF == 0:
            hint = "convert it to little-endian with gguf_convert_endian.py"
            raise FormatError("is big-endian", path=self.path, field="version", offset=4, got=version, hint=hint)
        if version not in (2, 3):
            hint = "convert the model again with today's llama.cpp"
            raise FormatError(
                "version is not supported",
                path=self.path,
                field="version",
                offset=4,
                expected="2 or 3",
                got=version,
                hint=hint,
            )
        n_tensors, n_keys = cursor.number("Q", "n_tensors"), cursor.number("Q", "n_kv")
        for field, count, most, least in (
            ("n_tensors", n_tensors, MAX_TENSORS, _SMALLEST_TENSOR),
            ("n_kv", n_keys, MAX_KEYS, _SMALLEST_KEY),
        ):
            if count > min(most, cursor.left // least):
                fits = f"at most {min(most, cursor.left // least)}"
                raise LimitExceeded("count is too large", path=self.path, field=field, expected=fits, got=count)
        cursor.spend(n_tensors * _TENSOR_MEMORY, "n_tensors")
        return n_tensors, n_keys

    def _alignment(self) -> int:
        key = "general.alignment"
        value = self.metadata.get(key, 32)
        good = isinstance(value, int) and self._types.get(key, "u32") == "u32"
        if not isinstance(value, int) or not good or not 8 <= value <= 65_536 or value & (value - 1):
            raise FormatError(
                "is no alignment", path=self.path, field=key, expected="u32, a power of two, 8 to 65536", got=value
            )
        return value

    def _table(self, cursor: Cursor, count: int, max_name: int) -> dict[str, GgufTensor]:
        entries: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for i in range(count):
            name = self._name(cursor, i, max_name)
            if name in entries:
                raise FormatError("tensor stands twice", path=self.path, field=name, offset=cursor.offset)
            entries[name] = self._entry(cursor, name)
        start = self._padded(cursor.offset)
        tensors = {}
        for name, (kind, shape, offset) in entries.items():
            tensors[name] = GgufTensor(name, kind, shape, start + offset, prod(shape) // kind.block * kind.nbytes)
        end = cursor.offset
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            self._check_place(info, start, self._padded(end))
            end = info.offset + info.nbytes
        if self.size > self._padded(end):
            raise FormatError(
                "has bytes after its last tensor", path=self.path, offset=end, expected=f"{end} bytes", got=self.size
            )
        return tensors

    def _name(self, cursor: Cursor, i: int, limit: int) -> str:
        start = cursor.offset
        name = cursor.text(limit, f"tensor {i}")
        if not name or not name.isprintable():
            raise FormatError("is no name for a tensor", path=self.path, field=f"tensor {i}", offset=start, got=name)
        return name

    def _entry(self, cursor: Cursor, name: str) -> tuple[BlockType, tuple[int, ...], int]:
        n_dims = cursor.number("I", name)
        if not 1 <= n_dims <= MAX_DIMS:
            raise LimitExceeded(
                "has an impossible number of dims", path=self.path, field=name, expected=f"1 to {MAX_DIMS}", got=n_dims
            )
        dims = [cursor.number("Q", name) for _ in range(n_dims)]
        kind = block_type(cursor.number("I", name), path=self.path, tensor=name)
        offset = cursor.number("Q", name)
        if 0 in dims or prod(dims) >= 1 << 63:
            raise ShapeMismatch("dims are impossible", path=self.path, field=name, got=dims)
        if dims[0] % kind.block:
            expected = f"a multiple of {kind.block}"
            raise DtypeError(
                f"row is not whole {kind.name} blocks", path=self.path, field=name, expected=expected, got=dims[0]
            )
        return kind, tuple(reversed(dims)), offset

    def _check_place(self, info: GgufTensor, start: int, expected: int) -> None:
        if (info.offset - start) % self.alignment:
            what, expected = "offset is not aligned", self.alignment
        elif info.offset < expected:
            what = "overlaps another tensor"
        elif info.offset > expected:
            what = "leaves a gap before it"
        elif info.offset + info.nbytes > self.size:
            raise TruncatedError(
                "ends inside a tensor",
                path=self.path,
                field=info.name,
                offset=info.offset,
                expected=f"{info.offset + info.nbytes} bytes or more",
                got=self.size,
            )
        else:
            return
        raise FormatError(what, path=self.path, field=info.name, offset=info.offset, expected=expected)

    def _padded(self, offset: int) -> int:
        return -(-offset // self.alignment) * self.alignment


_OLD = (b"FUGG", b"ggml", b"lmgg", b"ggjt", b"tjgg", b"ggmf", b"fmgg", b"ggla", b"algg")
