"""Quantized matrices in safetensors: a matrix is its rows of blocks as bytes, and the header says what they are.

A layer's experts are one tensor of three axes, the last of which is bytes.

::

    "__metadata__": {"cutaway.blocks": "{\"decoder.layers.0.…q.weight\": [\"Q4_K\", 2048], …}"}
    "decoder.layers.0.…q.weight": {"dtype": "U8", "shape": [2048, 1152], …}

Type and numbers of a row; the bytes are those that a GGUF has (`cutaway.formats.quants`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from cutaway.errors import DtypeError, FormatError
from cutaway.formats.quants import BLOCK_TYPES, BlockType, dequantise
from cutaway.formats.safetensors import SafetensorsFile
from cutaway.formats.shards import ShardedSafetensors
from cutaway.formats.strict_json import parse_json

KEY = "cutaway.blocks"
_MOST = 64 << 20  # bytes of JSON


def packed_text(kinds: Mapping[str, tuple[BlockType, int]]) -> dict[str, str]:
    """The header's entry, or none where no matrix is quantized: name → type, numbers in a row."""
    return {KEY: json.dumps({name: [kind.name, cols] for name, (kind, cols) in kinds.items()})} if kinds else {}


class Packed:
    """The quantized matrices of an open file or folder.

    Args:
        files: where they are.

    Attributes:
        kinds: type and numbers in a row of each.

    Raises:
        FormatError: the header's entry is no such list, or not of these tensors.
        DtypeError: a type that there is not, or rows that are not whole blocks of it.
    """

    def __init__(self, files: SafetensorsFile | ShardedSafetensors) -> None:
        self._files = files
        text = files.metadata.get(KEY)
        stated = {} if text is None else parse_json(text.encode(), path=files.path, limit=_MOST)
        if not isinstance(stated, dict):
            raise FormatError("is no list of types", path=files.path, field=KEY, expected="an object")
        names = {*files.names()}
        self.kinds: dict[str, tuple[BlockType, int]] = {}
        for name, entry in stated.items():
            if name not in names:
                raise FormatError("names a tensor that is not there", path=files.path, field=KEY, got=name)
            self.kinds[name] = self._kind(name, entry)

    def _kind(self, name: str, entry: object) -> tuple[BlockType, int]:
        path, info = self._files.path, self._files.info(name)
        match entry:
            case [str(word), int(cols)] if word in BLOCK_TYPES and cols > 0 and not isinstance(cols, bool):
                kind = BLOCK_TYPES[word]
            case _:
                raise DtypeError("is no type and width", path=path, field=name, expected='["Q4_K", 256]', got=entry)
        rows = info.dtype is torch.uint8 and len(info.shape) in (2, 3)
        if not rows or cols % kind.block or info.shape[-1] != kind.row_bytes(cols):
            wanted = f"bytes, rows of {cols} numbers of {kind.name}"
            raise DtypeError("is not what the header says", path=path, field=name, expected=wanted, got=info.shape)
        return kind, cols

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, in numbers."""
        shape = tuple(self._files.info(name).shape)
        return (*shape[:-1], self.kinds[name][1]) if name in self.kinds else shape

    def read(self, name: str) -> Tensor:
        """A tensor's numbers: fp32 where it is quantized, else as stored."""
        stored = self._files.read(name)
        if name not in self.kinds:
            return stored
        kind, cols = self.kinds[name]
        rows = torch.from_numpy(dequantise(stored.flatten(0, -2).numpy(), kind, cols))
        return rows.view(*stored.shape[:-1], cols)

    def raw(self, name: str) -> tuple[Tensor, int] | None:
        """A quantized matrix's rows as they are stored, and the number of their type."""
        return (self._files.read(name), self.kinds[name][0].id) if name in self.kinds else None
