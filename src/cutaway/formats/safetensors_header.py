"""The header of a safetensors file, checked whole before anything is allocated for a tensor.

::

    8 bytes  header length n, little-endian
    n bytes  JSON: {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}
    rest     tensor bytes, row-major, little-endian, without holes

The library accepts more than the format allows (doubled names, names that are no text, a space
before the first brace), so these rules are ours: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np
import torch

from cutaway.errors import DtypeError, FormatError, LimitExceeded, ShapeMismatch, TruncatedError
from cutaway.formats.files import read_head, read_into, refuse_foreign
from cutaway.formats.strict_json import Json, parse_json, pointer

__all__ = ["DTYPES", "MAX_RANK", "TensorInfo", "is_name", "parse_header"]

MAX_HEADER = 100_000_000  # bytes; the library's own limit
MAX_TENSORS = 1 << 20
MAX_RANK = 8
MAX_NAME = 512  # characters
_SPARE = 48 << 20  # bytes that parsing a header may cost beyond the size of the file
_FIELDS = {"dtype", "shape", "data_offsets"}

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: ``offset`` bytes into the file, ``nbytes`` long."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def is_name(name: str) -> bool:
    """Whether a tensor may be called so: printable text of bounded length. (It never becomes a path.)"""
    return 0 < len(name) <= MAX_NAME and name.isprintable()


def parse_header(file: BinaryIO, size: int, path: str) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """The free text and the tensors of a file of ``size`` bytes, in the header's order.

    Errors: TruncatedError, LimitExceeded, DtypeError, FormatError, each naming the tensor where
    there is one; ShapeMismatch where shape and bytes disagree; UnsafeFormatError for a pickle.
    """
    head = read_head(file, path)
    refuse_foreign(head, path=path, wanted="safetensors")
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8:
        raise TruncatedError("ends early", path=path, field="header_len", expected="8 bytes", got=len(head))
    if length > MAX_HEADER:
        most = f"at most {MAX_HEADER}"
        raise LimitExceeded("header is too large", path=path, field="header_len", expected=most, got=length)
    if 8 + length > size:
        more = f"{8 + length} bytes or more"
        raise TruncatedError("ends inside its header", path=path, field="header_len", expected=more, got=size)
    raw = np.empty(length, np.uint8)
    read_into(file, 8, raw, path=path, field="header_len")
    header = raw.tobytes()
    del raw
    if not header.startswith(b"{"):
        raise FormatError("header does not start with {", path=path, offset=8, got=header[:8])
    _bound(header, size, path)
    tree = parse_json(header, path=path, limit=MAX_HEADER, offset=8)
    assert isinstance(tree, dict)  # it starts with {
    metadata = _free_text(tree.pop("__metadata__", {}), path)
    infos = {name: _entry(name, value, 8 + length, path) for name, value in tree.items()}
    _check_cover(infos.values(), 8 + length, size, path)
    return metadata, infos


def _bound(header: bytes, size: int, path: str) -> None:
    """Refuse what would unfold to far more memory than the file takes, before unfolding it."""
    objects = header.count(b"{")
    if objects > MAX_TENSORS:
        raise LimitExceeded("too many tensors", path=path, expected=f"at most {MAX_TENSORS}", got=objects)
    # Text takes up to 4 bytes a character in memory; the rest are rounded sizes of Python's objects.
    text = len(header) * (2 if header.isascii() else 5)
    cost = text + 600 * objects + 80 * header.count(b"[") + 40 * header.count(b",")
    if cost > size + _SPARE:
        most = f"at most {size + _SPARE} bytes"
        raise LimitExceeded("header unfolds too far", path=path, field="header_len", expected=most, got=cost)


def _free_text(value: Json, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise FormatError("metadata is not an object", path=path, field="/__metadata__")
    texts = {}
    for key, text in value.items():
        if not isinstance(text, str):
            raise FormatError("metadata is not text", path=path, field=pointer("__metadata__", key), got=text)
        texts[key] = text
    return texts


def _entry(name: str, value: Json, start: int, path: str) -> TensorInfo:
    if not is_name(name):
        limit = f"1 to {MAX_NAME} printable characters"
        raise FormatError("is no name for a tensor", path=path, field=name[:80] or "''", expected=limit, got=len(name))
    if not isinstance(value, dict):
        raise FormatError("tensor entry is not an object", path=path, field=name)
    if extra := sorted(value.keys() - _FIELDS):
        warnings.warn(f"{path}: {name}: unknown fields {extra[:3]!r:.200} are not read", stacklevel=5)
    tag, sizes, offsets = value.get("dtype"), _ints(value.get("shape")), _ints(value.get("data_offsets"))
    if not isinstance(tag, str) or tag not in DTYPES:
        raise DtypeError("tensor has an unknown type", path=path, field=name, got=tag)
    if sizes is None:
        raise FormatError("shape is not a list of integers", path=path, field=name, got=value.get("shape"))
    if offsets is None or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        span = value.get("data_offsets")
        raise FormatError("data_offsets are not [begin, end]", path=path, field=name, got=span)
    if len(sizes) > MAX_RANK:
        most = f"at most {MAX_RANK}"
        raise LimitExceeded("tensor has too many axes", path=path, field=name, expected=most, got=len(sizes))
    # The product without zeros is what strides are made of, and must fit even if there is no element.
    if min(sizes, default=0) < 0 or prod(max(size, 1) for size in sizes) >= 1 << 63:
        raise ShapeMismatch("shape is impossible", path=path, field=name, got=list(sizes))
    nbytes, stored = prod(sizes) * DTYPES[tag].itemsize, offsets[1] - offsets[0]
    if nbytes != stored:
        what = f"{tag} {list(sizes)} does not fill its bytes"
        raise ShapeMismatch(what, path=path, field=name, expected=nbytes, got=stored)
    return TensorInfo(name, DTYPES[tag], sizes, start + offsets[0], nbytes)


def _check_cover(infos: Iterable[TensorInfo], start: int, size: int, path: str) -> None:
    end = start
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            what = "leaves a hole before it" if info.offset > end else "overlaps another tensor"
            raise FormatError(what, path=path, field=info.name, offset=info.offset, expected=end)
        end += info.nbytes
        if end > size:
            more = f"{end} bytes or more"
            raise TruncatedError("ends inside a tensor", path=path, field=info.name, expected=more, got=size)
    if end != size:
        raise FormatError("has bytes after its last tensor", path=path, offset=end, expected=f"{end} bytes", got=size)


def _ints(value: Json) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    numbers = [item for item in value if isinstance(item, int) and not isinstance(item, bool)]
    return tuple(numbers) if len(numbers) == len(value) else None
