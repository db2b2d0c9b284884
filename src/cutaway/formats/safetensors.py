"""safetensors files: read by our own checks, written by the library.

A header is checked whole before anything is allocated (`cutaway.formats.safetensors_header`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import BinaryIO, Self

import safetensors
import safetensors.torch
import torch

from cutaway.errors import FormatError, RequestError, ShapeMismatch, StorageError
from cutaway.formats.files import (
    Progress,
    StrPath,
    atomic_write,
    empty_bytes,
    map_private,
    nonfinite,
    open_regular,
    read_into,
)
from cutaway.formats.safetensors_header import DTYPES, MAX_RANK, TensorInfo, is_name, parse_header

__all__ = ["DTYPES", "SafetensorsFile", "TensorInfo", "check_storable", "save_safetensors", "write_safetensors"]


class SafetensorsFile:
    """A safetensors file whose header has been checked against the file's size.

    Tensors are read into private memory, so that nothing done to the file afterwards reaches
    them. ``mmap=True`` maps them instead: faster to start, but a file cut short under us kills
    the process. ``metadata`` holds the free text of the header.

    Errors: FormatError and its kinds, ShapeMismatch where shape and bytes disagree,
    UnsafeFormatError for a pickle. Format: https://github.com/huggingface/safetensors#format
    """

    def __init__(self, path: StrPath, *, mmap: bool = False) -> None:
        self.path = os.fspath(path)
        self._file = open_regular(path)
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.metadata, self._infos = parse_header(self._file, self.size, self.path)
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
        self._file.close()
        self._map = None

    def names(self) -> list[str]:
        """The tensors, in the header's order."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Type, shape and place of a tensor. ShapeMismatch if the file has none of this name."""
        if name not in self._infos:
            raise ShapeMismatch("tensor is missing", path=self.path, field=name)
        return self._infos[name]

    def read(self, name: str, *, progress: Progress | None = None) -> torch.Tensor:
        """One tensor as stored. ``progress`` is told the bytes just read.

        Errors: FormatError for a boolean that is neither 0 nor 1, StorageError, ResourceError.
        """
        info = self.info(name)
        mapped = self._map
        if mapped is not None and (info.offset % info.dtype.itemsize == 0):
            data = mapped[info.offset : info.offset + info.nbytes]
            if progress is not None:
                progress(info.nbytes)
        else:  # also where the mapping would be misaligned
            data = empty_bytes(info.nbytes, path=self.path, field=name)
            read_into(self._file, info.offset, data.numpy(), path=self.path, field=name, progress=progress)
        if info.dtype is torch.bool and bool((data > 1).any()):
            raise FormatError("boolean is neither 0 nor 1", path=self.path, field=name, offset=info.offset)
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        return data.view(info.dtype).reshape(info.shape)

    def count_nonfinite(self) -> dict[str, int]:
        """How many numbers of each tensor are NaN or infinite; tensors without any are left out."""
        numbers = (info for info in self._infos.values() if info.dtype.is_floating_point or info.dtype.is_complex)
        counts = {info.name: nonfinite(self.read(info.name)) for info in numbers}
        return {name: count for name, count in counts.items() if count}


def save_safetensors(
    path: StrPath,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    verify: bool = True,
) -> None:
    """Write tensors so that ``path`` is the old file or the whole new one, even if it is being read.

    Tensors may be views, share memory or live elsewhere; each is stored by itself. ``verify``
    reads the new file back and compares every byte before it takes its name.
    Errors: RequestError for what the format cannot hold, StorageError for a disk that refuses.
    Format: https://github.com/huggingface/safetensors#format
    """
    check_storable(path, tensors)
    with atomic_write(path, expect=sum(tensor.nbytes for tensor in tensors.values())) as file:
        write_safetensors(file, tensors, metadata, path, verify)


def write_safetensors(
    file: BinaryIO,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None,
    path: StrPath,
    verify: bool,
) -> None:
    """The part of `save_safetensors` between opening and renaming: fill ``file``, which will be ``path``."""
    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # The library refuses tensors of one storage, so each gets its own: a new one over the same
        # memory where that starts elsewhere than all before, a copy where two start alike (tied weights).
        if tensor.numel() == 0:
            plain[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            continue
        if tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        plain[name] = torch.from_numpy(_bytes(tensor).numpy()).view(tensor.dtype).reshape(tensor.shape)
    texts = dict(metadata or {})
    for key, text in texts.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise RequestError("metadata is not text", path=path, field=str(key), got=text)
    try:
        safetensors.torch.save_file(plain, file.name, metadata=texts or None)
    except safetensors.SafetensorError as error:
        raise StorageError("cannot be written", path=path, got=error) from error
    if verify:
        _compare(path, file.name, plain)


def check_storable(path: StrPath, tensors: Mapping[str, object]) -> None:
    """RequestError, naming the tensor, unless the format can hold all of these."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not is_name(name) or name == "__metadata__":
            raise RequestError("is no name for a tensor", path=path, field=str(name)[:80] or "''")
        if not isinstance(tensor, torch.Tensor):
            raise RequestError("is not a tensor", path=path, field=name, got=type(tensor).__name__)
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise RequestError("has no plain values to store", path=path, field=name, expected="a dense tensor")
        if tensor.dtype not in DTYPES.values():
            raise RequestError("safetensors cannot hold this type", path=path, field=name, got=tensor.dtype)
        if tensor.dim() > MAX_RANK:
            raise RequestError("has too many axes", path=path, field=name, expected=MAX_RANK, got=tensor.dim())


def _compare(path: StrPath, written: str, tensors: Mapping[str, torch.Tensor]) -> None:
    with SafetensorsFile(written) as back:
        for name, tensor in tensors.items():
            info = back.info(name)
            same = info.dtype is tensor.dtype and info.shape == tuple(tensor.shape)
            # Bytes, so that NaN equals NaN and 0 differs from -0.
            if not same or not torch.equal(_bytes(back.read(name)), _bytes(tensor)):
                raise StorageError("what was written reads back differently", path=path, field=name)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    # A single element may call itself contiguous with any stride, but cannot be viewed so.
    return flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8)
