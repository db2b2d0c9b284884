"""Floats to blocks: the other way of `cutaway.formats.quants`.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 give the bytes of ggml's reference. Those of 256 weights are searched for: see
`cutaway.formats.kquantise`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cutaway.errors import DtypeError
from cutaway.formats import kquantise
from cutaway.formats.kquantise import halves, packed_nibbles
from cutaway.formats.quants import BLOCK_TYPES, BlockType, chunk_blocks

QUANTISED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q6_K", "Q5_K", "Q4_K")
# What takes the place of blocks of 256 where rows are not whole ones, as in llama.cpp.
_NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def type_for(type: BlockType, cols: int) -> BlockType | None:
    """The type that rows of this width can have: the one asked for, a narrower block, or None."""
    for name in (type.name, _NARROW.get(type.name, "")):
        if name and cols % BLOCK_TYPES[name].block == 0:
            return BLOCK_TYPES[name]
    return None


def quantise(weights: Tensor, type: BlockType) -> Tensor:
    """Rows of floats as blocks: float [..., rows, cols] → uint8 [..., rows, type.row_bytes(cols)].

    Raises:
        DtypeError: the rows are not whole blocks, a number is not finite or too large, or the type is not written.
    """
    if type.name not in _KERNELS:
        raise DtypeError("is not written", field=type.name, expected=", ".join(QUANTISED), got=type.name)
    if weights.dim() < 2 or weights.shape[-1] % type.block:
        what = f"rows are not whole {type.name} blocks"
        raise DtypeError(what, expected=f"a multiple of {type.block}", got=list(weights.shape))
    if weights.dim() > 2:  # one at a time: a layer's experts are large
        return torch.stack([quantise(part, type) for part in weights])
    if not bool(weights.isfinite().all()) or (weights.numel() and float(weights.abs().max()) > _LARGEST):
        raise DtypeError("numbers that a block cannot hold", expected=f"finite, up to {_LARGEST:g}", got=type.name)
    blocks = weights.float().reshape(-1, type.block)
    out = torch.empty(len(blocks), type.nbytes, dtype=torch.uint8)
    step = max(1, chunk_blocks(type))
    for start in range(0, len(blocks), step):
        out[start : start + step] = _KERNELS[type.name](blocks[start : start + step])
    return out.view(weights.shape[0], -1)


_LARGEST = 60_000.0  # a scale is a half-precision number


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _signed(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The number that is largest without its sign becomes the lowest code. → scale [n, 1], codes uint8 [n, 32]"""
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    scale = largest / -(levels // 2)
    # Product and sum are rounded to fp32 one after the other, as the reference's are.
    codes = (x * _inverse(scale) + (levels // 2 + 0.5)).trunc()
    return scale, codes.clamp(0, levels - 1).to(torch.uint8)


def _between(x: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """From the least to the largest. → scale [n, 1], least [n, 1], codes uint8 [n, 32]"""
    least = x.amin(1, keepdim=True)
    scale = (x.amax(1, keepdim=True) - least) / (levels - 1)
    codes = ((x - least) * _inverse(scale) + 0.5).trunc()
    return scale, least, codes.clamp(0, levels - 1).to(torch.uint8)


def _fifth_bits(codes: Tensor) -> Tensor:
    """uint8 [n, 32] → uint8 [n, 4]: bit j is the fifth bit of code j."""
    bits = (codes >> 4).view(-1, 4, 8).int() << torch.arange(8)
    return bits.sum(2).to(torch.uint8)


def _q4_0(x: Tensor) -> Tensor:
    scale, codes = _signed(x, 16)
    return torch.cat([halves(scale), packed_nibbles(codes)], 1)


def _q4_1(x: Tensor) -> Tensor:
    scale, least, codes = _between(x, 16)
    return torch.cat([halves(scale), halves(least), packed_nibbles(codes)], 1)


def _q5_0(x: Tensor) -> Tensor:
    scale, codes = _signed(x, 32)
    return torch.cat([halves(scale), _fifth_bits(codes), packed_nibbles(codes & 15)], 1)


def _q5_1(x: Tensor) -> Tensor:
    scale, least, codes = _between(x, 32)
    return torch.cat([halves(scale), halves(least), _fifth_bits(codes), packed_nibbles(codes & 15)], 1)


def _q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(scale)
    size = scaled.abs()  # halves are rounded away from zero
    rounded = size.floor() + (2 * (size - size.floor())).floor()
    return torch.cat([halves(scale), (scaled.sign() * rounded).to(torch.int8).view(torch.uint8)], 1)


_KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    **kquantise.KERNELS,
}
