"""How numbers are stored in GGUF tensors: the table of block types, and turning blocks into floats.

A row of a tensor is cut into blocks of 1, 32 or 256 weights; a block holds its weights as small
integers and one or two scales::

    Q4_0   d  ·  16 bytes of two 4-bit q        w = (q - 8) d             2 + 16      bytes for 32
    Q4_1   d m · 16 bytes                       w = q d + m               4 + 16
    Q5_0   d  ·  4 bytes of fifth bits · 16     w = (q - 16) d            2 + 4 + 16
    Q5_1   d m · 4 bytes · 16                   w = q d + m               4 + 4 + 16
    Q8_0   d  ·  32 signed bytes                w = q d                   2 + 32
    Q2_K … Q6_K: see `cutaway.formats.kquants`                            84 … 210    bytes for 256

Types and layouts: ggml-common.h, https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cutaway.errors import DtypeError
from cutaway.formats import kquants
from cutaway.formats.files import StrPath
from cutaway.formats.kquants import fields, half

__all__ = ["BLOCK_TYPES", "BlockType", "block_type", "chunk_blocks", "dequantise", "dequantise_blocks"]

_CHUNK = 1 << 19  # weights at a time: the float32 of one chunk stay near the second-level cache


@dataclass(frozen=True, slots=True)
class BlockType:
    """One storage type: ``block`` weights take ``nbytes`` bytes.

    ``dtype`` is the torch type of the same bytes where a block is one plain number, else None.
    """

    name: str
    id: int
    block: int
    nbytes: int
    dtype: torch.dtype | None = None

    @property
    def bits(self) -> float:
        """Bits per weight, scales included (4.5 for Q4_0)."""
        return 8 * self.nbytes / self.block

    def row_bytes(self, n_cols: int) -> int:
        """Bytes of a row of ``n_cols`` weights, a multiple of ``block``."""
        return n_cols // self.block * self.nbytes


BLOCK_TYPES: dict[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType("F32", 0, 1, 4, torch.float32),
        BlockType("F16", 1, 1, 2, torch.float16),
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("I8", 24, 1, 1, torch.int8),
        BlockType("I16", 25, 1, 2, torch.int16),
        BlockType("I32", 26, 1, 4, torch.int32),
        BlockType("I64", 27, 1, 8, torch.int64),
        BlockType("F64", 28, 1, 8, torch.float64),
        BlockType("BF16", 30, 1, 2, torch.bfloat16),
    )
}
_BY_ID = {kind.id: kind for kind in BLOCK_TYPES.values()}

# What else files hold, so that an error can call it by its name. The bracketed ones ggml dropped.
_OTHERS = {
    4: "Q4_2 (removed)", 5: "Q4_3 (removed)", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 31: "Q4_0_4_4 (removed)",
    32: "Q4_0_4_8 (removed)", 33: "Q4_0_8_8 (removed)", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4 (removed)",
    37: "IQ4_NL_4_8 (removed)", 38: "IQ4_NL_8_8 (removed)", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def block_type(id: int, *, path: StrPath | None = None, tensor: str | None = None) -> BlockType:
    """The storage type with ggml's number ``id``. DtypeError, naming the tensor, for one we cannot read."""
    if id not in _BY_ID:
        got = f"{_OTHERS.get(id, 'type')} {id}" if id in _OTHERS else f"type {id}"
        hint = "requantise the model to one of these types"
        raise DtypeError(
            "tensor type is not supported", path=path, field=tensor, expected=", ".join(BLOCK_TYPES), got=got, hint=hint
        )
    return _BY_ID[id]


def dequantise(raw: npt.NDArray[np.uint8], type: BlockType, n_cols: int) -> npt.NDArray[np.float32]:
    """Stored rows as floats: uint8 [rows, type.row_bytes(n_cols)] → float32 [rows, n_cols].

    Bit for bit what ggml's reference gives (payloads of NaN aside). NaN and infinite scales go
    through. Errors: DtypeError where the bytes are not whole blocks of such rows.
    """
    if n_cols % type.block or raw.ndim != 2 or raw.shape[1] != type.row_bytes(n_cols):
        expected = f"[rows, {type.row_bytes(n_cols)}] of blocks of {type.block}"
        raise DtypeError(f"bytes are not {type.name} rows of {n_cols}", expected=expected, got=list(raw.shape))
    out = np.empty((raw.shape[0], n_cols), np.float32)
    blocks, floats = raw.reshape(-1, type.nbytes), torch.from_numpy(out).view(-1, type.block)
    step = chunk_blocks(type)
    for start in range(0, len(blocks), step):
        part = np.require(blocks[start : start + step], requirements=["C", "W"])  # torch warns about read-only memory
        dequantise_blocks(torch.from_numpy(part), type, floats[start : start + step])
    return out


def chunk_blocks(type: BlockType) -> int:
    """How many blocks to take at a time."""
    return _CHUNK // type.block


def dequantise_blocks(blocks: torch.Tensor, type: BlockType, out: torch.Tensor) -> None:
    """One chunk: uint8 [n, type.nbytes], contiguous, into float32 ``out`` [n, type.block].

    Temporary memory is some times that of ``out``; callers cut large tensors (see `dequantise`).
    """
    if type.dtype is not None:
        out.copy_(blocks.view(-1).view(type.dtype).view(-1, 1))
    else:
        _KERNELS[type.name](blocks, out)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.sub(fields(blocks[:, 2:], 4).view(-1, 32), 8.0, out=out)
    out.mul_(half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(fields(blocks[:, 4:], 4).view(-1, 32), half(blocks, 0), out=out)
    out.add_(half(blocks, 2))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.sub(_five_bits(blocks[:, 2:]), 16.0, out=out)
    out.mul_(half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(_five_bits(blocks[:, 4:]), half(blocks, 0), out=out)
    out.add_(half(blocks, 2))


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), half(blocks, 0), out=out)


# Byte j of entry b is 16 if bit j of b is set: the fifth bits of eight weights, ready to be added.
_FIFTH = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 4).view(np.int64)[:, 0]


def _five_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4 + 16] → uint8 [n, 32]: bit j of the first four bytes is the fifth bit of weight j."""
    high = torch.from_numpy(_FIFTH)[packed[:, :4].int()]
    return (fields(packed[:, 4:], 4).view(torch.int64).view(-1, 4) | high).view(torch.uint8)


_KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    **kquants.KERNELS,
}
