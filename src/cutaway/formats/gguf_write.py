"""Writing GGUF: metadata, tensor table and tensors, one tensor in memory at a time.

The counterpart of :mod:`cutaway.formats.gguf`, which draws the layout. What was written is read back by that reader
and compared, key by key and bit by bit, before the file takes its name.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch

from cutaway.errors import RequestError, StorageError
from cutaway.formats.files import Progress, StrPath, atomic_write
from cutaway.formats.gguf import MAX_DIMS, MAX_NAME, GgufFile
from cutaway.formats.quants import BLOCK_TYPES, BlockType

__all__ = ["PLAIN_TYPES", "FileTensor", "Metadata", "Typed", "write_gguf"]

VERSION = 3
ALIGNMENT = 32
_CODES = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "arr": 9}
_CODES |= {"u64": 10, "i64": 11, "f64": 12}
_KINDS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "?"}
_KINDS |= {"u64": "Q", "i64": "q", "f64": "d"}
_CHUNK = 1 << 22  # numbers converted at a time

PLAIN_TYPES = {kind.dtype: kind for name, kind in BLOCK_TYPES.items() if name in ("F32", "F16", "BF16")}

Typed: TypeAlias = tuple[str, Any]
"""A value with its type in the file: ``("u32", 5)``, ``("str", "llama")``, ``("arr[str]", […])``."""
Metadata: TypeAlias = Mapping[str, Typed]


@final
@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor to be written.

    Attributes:
        name: in the file.
        shape: as in torch, outermost first.
        type: of its numbers in the file.
        make: computes it when its turn comes: its numbers, in any floating-point type, where that is F32, F16 or
            BF16; or its rows as they are to stand in the file. uint8 [..., bytes of a row]
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        return prod(self.shape) // self.type.block * self.type.nbytes


def write_gguf(
    path: StrPath,
    metadata: Metadata,
    tensors: Sequence[FileTensor],
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write a file so that ``path`` is, at every moment, the old one or the whole new one.

    Args:
        path: may be the file that the tensors come from.
        metadata: key → type and value, in the file's order.
        tensors: in the file's order.
        verify: read the new file back and compare everything before it takes its name.
        progress: told the bytes just written.

    Raises:
        RequestError: a name, shape, type or number that the format cannot hold.
        StorageError: the disk refused, or gave back something else than was written.
    """
    head = _head(metadata, tensors, path)
    total = len(head) + sum(_padded(tensor.nbytes) for tensor in tensors)
    with atomic_write(path, expect=total) as file:
        file.write(head)
        # Remembered as a hash: to make a quantized tensor again would take as long as the first time.
        written = [_write(file, tensor, path, progress) for tensor in tensors]
        if verify:
            file.flush()
            _compare(file.name, metadata, tensors, written, path)


# ---- the tables --------------------------------------------------------------------------------------------


def _head(metadata: Metadata, tensors: Sequence[FileTensor], path: StrPath) -> bytes:
    out = bytearray(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, (kind, value) in metadata.items():
        out += _text(key, path, key)
        try:
            out += _value(kind, value, path, key)
        except (struct.error, OverflowError, ValueError, TypeError, KeyError) as error:
            raise RequestError("is no value of this type", path=path, field=key, expected=kind, got=value) from error
    offset, seen = 0, set()
    for tensor in tensors:
        name = tensor.name
        if name in seen or len(name.encode()) > MAX_NAME or not 1 <= len(tensor.shape) <= MAX_DIMS:
            what = "cannot be a tensor of the file: it is there already, has too long a name or too many axes"
            raise RequestError(what, path=path, field=name, got=list(tensor.shape))
        if tensor.shape[-1] % tensor.type.block:
            what, wanted = f"rows are not whole {tensor.type.name} blocks", f"a multiple of {tensor.type.block}"
            raise RequestError(what, path=path, field=name, expected=wanted, got=list(tensor.shape))
        seen.add(name)
        dims = tensor.shape[::-1]
        out += _text(name, path, name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type.id, offset)
        offset += _padded(tensor.nbytes)
    return bytes(out) + bytes(-len(out) % ALIGNMENT)


def _text(text: str, path: StrPath, field: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("holds half a surrogate pair", path=path, field=field) from error
    return struct.pack("<Q", len(data)) + data


def _value(kind: str, value: Any, path: StrPath, field: str) -> bytes:
    if kind.startswith("arr["):
        inner = kind[4:-1]
        head = struct.pack("<IIQ", _CODES["arr"], _CODES[inner], len(value))
        if inner == "str":
            return head + b"".join(_text(item, path, f"{field}[{i}]") for i, item in enumerate(value))
        return head + struct.pack(f"<{len(value)}{_KINDS[inner]}", *value)
    code = struct.pack("<I", _CODES[kind])
    return code + (_text(value, path, field) if kind == "str" else struct.pack("<" + _KINDS[kind], value))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# ---- the tensors -------------------------------------------------------------------------------------------


def _parts(tensor: FileTensor, path: StrPath) -> Iterator[npt.NDArray[np.uint8]]:
    """A tensor's bytes, some at a time."""
    made, kind = tensor.make().detach(), tensor.type
    packed = made.dtype is torch.uint8
    wanted = (*tensor.shape[:-1], kind.row_bytes(tensor.shape[-1])) if packed else tensor.shape
    if tuple(made.shape) != wanted or not (packed or kind.dtype):
        what = "has another shape than was said"
        raise RequestError(what, path=path, field=tensor.name, expected=list(wanted), got=list(made.shape))
    for part in made.cpu().contiguous().reshape(-1).split(_CHUNK):
        turned = part
        if not packed:
            assert kind.dtype is not None
            turned = part.to(kind.dtype)
            if kind.dtype is torch.float16 and bool((turned.isinf() & part.isfinite()).any()):
                hint = "bfloat16 reaches as far as float32"
                raise RequestError("a number is too large for F16", path=path, field=tensor.name, hint=hint)
        yield turned.contiguous().view(torch.uint8).numpy()


def _write(file: BinaryIO, tensor: FileTensor, path: StrPath, progress: Progress | None) -> bytes:
    """Write one; → the hash of its bytes."""
    found = hashlib.blake2b()
    for part in _parts(tensor, path):
        file.write(part.data)
        found.update(part.data)
        if progress is not None:
            progress(part.nbytes)
    file.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))
    return found.digest()


def _compare(
    written: str, metadata: Metadata, tensors: Sequence[FileTensor], hashes: Sequence[bytes], path: StrPath
) -> None:
    """Everything that is in the new file, against what was to be written."""

    def different(field: str) -> StorageError:
        return StorageError("what was written reads back differently", path=path, field=field)

    with GgufFile(written) as back:
        for key, (kind, value) in metadata.items():
            if key not in back.metadata or back.type_of(key) != kind or not _same(kind, value, back.metadata[key]):
                raise different(key)
        if back.names() != [tensor.name for tensor in tensors] or len(back.metadata) != len(metadata):
            raise different("the tables")
        for tensor, wanted in zip(tensors, hashes, strict=True):
            info = back.info(tensor.name)
            if info.type is not tensor.type or info.shape != tensor.shape:
                raise different(tensor.name)
            if hashlib.blake2b(back.raw(tensor.name).reshape(-1).data).digest() != wanted:
                raise different(tensor.name)


def _same(kind: str, value: Any, found: Any) -> bool:
    if kind.startswith("arr[") and kind != "arr[str]":
        return np.array_equal(np.asarray(value, dtype=found.dtype), found)
    if kind == "f32":
        return bool(np.float32(value) == np.float32(found))
    return bool(found == (list(value) if kind == "arr[str]" else value))
