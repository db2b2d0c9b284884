"""Super-blocks of 256 weights ("k-quants"), and the unpacking that all block types share.

A super-block has half-precision scales d (and dmin), and small integers that scale each group::

    Q2_K   16 groups of 16   scales[16] qs[64] d dmin              w = (d s) q - (dmin m)
    Q3_K   16 groups of 16   hmask[32] qs[64] scales[12] d         w = (d (s - 32)) (q - 4 where hmask is 0)
    Q4_K    8 groups of 32   d dmin scales[12] qs[128]             w = (d s) q - (dmin m)
    Q5_K    8 groups of 32   d dmin scales[12] qh[32] qs[128]      w = (d s) q - (dmin m)
    Q6_K   16 groups of 16   ql[128] qh[64] scales[16] d           w = (d s) (q - 32)

Products are taken in the order of the brackets, in float32, so that the bits are ggml's
(https://github.com/ggml-org/llama.cpp/pull/1684). Everywhere uint8 [n, bytes] comes in and
float32 ``out`` [n, 256] is filled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["KERNELS", "fields", "half"]

_EVERY_BYTE = 0x0101010101010101


def _view(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes as wider numbers. They are copied, unless they lie together and aligned."""
    shape = (*packed.shape[:-1], packed.shape[-1] // dtype.itemsize)
    flat = packed.reshape(-1)  # a copy, unless it is a slice of a single block
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The half-precision number at byte ``at`` of each block: float32 [n, 1]."""
    return _view(blocks[:, at : at + 2], torch.float16).float()


def fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes taken apart: uint8 [..., k] → uint8 [..., 8 / bits, k], lowest bits first. k a multiple of 8."""
    # Eight bytes a time. What a shift drags in from the next byte, the mask removes.
    lanes = _view(packed, torch.int64)
    out = lanes.new_empty(*lanes.shape[:-1], 8 // bits, lanes.shape[-1])
    mask = _EVERY_BYTE * ((1 << bits) - 1)
    for i in range(8 // bits):
        torch.bitwise_and(lanes >> (i * bits), mask, out=out[..., i, :])
    return out.view(torch.uint8)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and minima of Q4_K and Q5_K: uint8 [n, 12] → two float32 [n, 8, 1].

    ::

        bytes 0-3   s0…s3 in six bits, two upper bits of s4…s7 above them
        bytes 4-7   m0…m3 and m4…m7 likewise
        bytes 8-11  four lower bits of s4…s7, of m4…m7 above them
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([a & 63, (c & 15) | (a >> 6 << 4)], dim=1)
    minima = torch.cat([b & 63, (c >> 4) | (b >> 6 << 4)], dim=1)
    return scales.float().unsqueeze(-1), minima.float().unsqueeze(-1)


def _affine(scale: torch.Tensor, codes: torch.Tensor, shift: torch.Tensor, out: torch.Tensor) -> None:
    """out = scale · codes - shift, rounded after each step; [n, groups, 1], [n, groups, size]."""
    grouped = out.view(codes.shape)
    torch.mul(codes, scale, out=grouped)
    grouped.sub_(shift)


def _q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales = blocks[:, :16]
    codes = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2)
    scale = half(blocks, 80) * (scales & 15).float()
    shift = half(blocks, 82) * (scales >> 4).float()
    _affine(scale.unsqueeze(-1), codes.view(-1, 16, 16), shift.unsqueeze(-1), out)


def _q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    low = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).view(-1, 256)
    present = fields(blocks[:, :32], 1).view(-1, 256)
    packed = blocks[:, 96:108]
    # Sixteen 6-bit scales: four lower bits in the nibbles of bytes 0-7, two upper in the pairs of 8-11.
    lower = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], dim=1)
    upper = torch.cat([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    scale = half(blocks, 108) * ((lower | upper << 4).float() - 32.0)
    torch.sub(low | present << 2, 4.0, out=out)  # a set bit of hmask makes up for the four taken away
    out.view(-1, 16, 16).mul_(scale.unsqueeze(-1))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = _six_bits(blocks[:, 4:16])
    codes = fields(blocks[:, 16:144].reshape(-1, 4, 32), 4).view(-1, 8, 32)
    _affine(half(blocks, 0).unsqueeze(-1) * scales, codes, half(blocks, 2).unsqueeze(-1) * minima, out)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = _six_bits(blocks[:, 4:16])
    low = fields(blocks[:, 48:176].reshape(-1, 4, 32), 4).view(-1, 8, 32)
    codes = low | fields(blocks[:, 16:48], 1) << 4
    _affine(half(blocks, 0).unsqueeze(-1) * scales, codes, half(blocks, 2).unsqueeze(-1) * minima, out)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4).view(-1, 256)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).view(-1, 256)
    scale = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    torch.sub(low | high << 4, 32.0, out=out)
    out.view(-1, 16, 16).mul_(scale.unsqueeze(-1))


KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
