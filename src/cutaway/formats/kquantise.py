"""Floats to super-blocks of 256 weights (Q4_K, Q5_K, Q6_K): a search for the scales that leave the least error.

Each group of 16 or 32 weights gets a scale (and a least value) that is itself a small whole number times one of the
super-block. Several candidates are tried for each group; given the codes, the best scale is the one of least squares.
Last, the codes are chosen anew for the scales as they came out when rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TRIES, REFITS = 21, 2  # candidates for each group's scale, and how often each is fitted to its own codes


def halves(x: Tensor) -> Tensor:
    """Half-precision numbers as bytes. [n, 1] → uint8 [n, 2]"""
    return x.half().contiguous().view(torch.uint8)


def packed_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte: the first half of a row in the low bits. uint8 [n, k] → uint8 [n, k / 2]"""
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def _asymmetric(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scale and least value (≤ 0) of each group, for codes 0 … top. [n, group, size] → two [n, group]"""
    least = x.amin(-1).clamp(max=0)
    width = (x.amax(-1) - least).clamp(min=0)
    best_scale, best_least = width / top, least
    best = _error(x, best_scale, best_least, top)
    for step in range(TRIES):
        # From a little wider than what there is, to so narrow that the outermost are cut off.
        scale, low = width * (1.08 - 0.4 * step / (TRIES - 1)) / top, least
        for _ in range(REFITS):
            scale, low = _fitted(x, _codes(x, scale, low, top))
            error = _error(x, scale, low, top)
            better = error < best
            best = torch.where(better, error, best)
            best_scale, best_least = torch.where(better, scale, best_scale), torch.where(better, low, best_least)
    return best_scale, best_least


def _fitted(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares: the scale and the least value (≤ 0) that suit these codes best."""
    n = x.shape[-1]
    q, xs = codes.sum(-1), x.sum(-1)
    qq, qx = (codes * codes).sum(-1), (codes * x).sum(-1)
    spread = n * qq - q * q
    scale = torch.where(spread > 0, (n * qx - q * xs) / spread.clamp(min=1e-30), 0.0)
    least = (xs - scale * q) / n
    # Above zero a least value cannot be: then it is zero.
    through_zero = torch.where(qq > 0, qx / qq.clamp(min=1e-30), 0.0)
    return torch.where(least > 0, through_zero, scale).clamp(min=0), least.clamp(max=0)


def _codes(x: Tensor, scale: Tensor, least: Tensor, top: int) -> Tensor:
    inverse = torch.where(scale > 0, 1.0 / scale.clamp(min=1e-30), 0.0)
    return ((x - least.unsqueeze(-1)) * inverse.unsqueeze(-1)).round().clamp(0, top)


def _error(x: Tensor, scale: Tensor, least: Tensor, top: int) -> Tensor:
    codes = _codes(x, scale, least, top)
    return (codes * scale.unsqueeze(-1) + least.unsqueeze(-1) - x).square().sum(-1)


def _with_minima(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """→ d, dmin [n, 1], scales and minima uint8 [n, 8], codes uint8 [n, 8, 32]"""
    top = (1 << bits) - 1
    groups = x.view(-1, 8, 32)
    scale, least = _asymmetric(groups, top)
    d, dmin = scale.amax(1, keepdim=True) / 63, (-least).amax(1, keepdim=True) / 63
    d, dmin = d.half().float(), dmin.half().float()
    s = _rounded(scale, d)
    m = _rounded(-least, dmin)
    codes = _codes(groups, d * s, -dmin * m, top)
    # With codes and scale as they are, the least value may do better one step up or down, and so may the scale.
    for ds, dm in ((0, -1), (0, 1), (-1, 0), (1, 0), (-1, -1), (1, 1), (1, -1), (-1, 1)):
        s2, m2 = (s + ds).clamp(0, 63), (m + dm).clamp(0, 63)
        better = _error(groups, d * s2, -dmin * m2, top) < _error(groups, d * s, -dmin * m, top)
        s, m = torch.where(better, s2, s), torch.where(better, m2, m)
        codes = _codes(groups, d * s, -dmin * m, top)
    return d, dmin, s.to(torch.uint8), m.to(torch.uint8), codes.to(torch.uint8)


def _rounded(x: Tensor, unit: Tensor) -> Tensor:
    return torch.where(unit > 0, x / unit.clamp(min=1e-30), 0.0).round().clamp(0, 63)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Two uint8 [n, 8] in 12 bytes, as `kquants` takes them apart."""
    a = (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6)
    b = (minima[:, :4] & 63) | (minima[:, 4:] >> 4 << 6)
    return torch.cat([a, b, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], 1)


def _pairs(codes: Tensor) -> Tensor:
    """Groups two by two, the first in the low bits. uint8 [n, 8, 32] → uint8 [n, 128]"""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).flatten(1)


def _q4_k(x: Tensor) -> Tensor:
    d, dmin, s, m, codes = _with_minima(x, 4)
    return torch.cat([halves(d), halves(dmin), _six_bits(s, m), _pairs(codes)], 1)


def _q5_k(x: Tensor) -> Tensor:
    d, dmin, s, m, codes = _with_minima(x, 5)
    fifth = ((codes >> 4).int() << torch.arange(8)[:, None]).sum(1).to(torch.uint8)
    return torch.cat([halves(d), halves(dmin), _six_bits(s, m), fifth, _pairs(codes & 15)], 1)


def _symmetric(x: Tensor, top: int) -> Tensor:
    """A scale of either sign for each group, for codes −top … top − 1. [n, group, size] → [n, group]"""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))[..., 0]
    best_scale = torch.zeros_like(largest)
    best = x.square().sum(-1)
    for step in range(TRIES):
        divisor = -(top + 0.12 * (step - TRIES // 2))
        scale = largest / divisor
        codes = _signed_codes(x, scale, top)
        weight = x.square()
        qq, qx = (weight * codes * codes).sum(-1), (weight * codes * x).sum(-1)
        for found in (scale, torch.where(qq > 0, qx / qq.clamp(min=1e-30), 0.0)):
            error = (_signed_codes(x, found, top) * found.unsqueeze(-1) - x).square().sum(-1)
            better = error < best
            best, best_scale = torch.where(better, error, best), torch.where(better, found, best_scale)
    return best_scale


def _signed_codes(x: Tensor, scale: Tensor, top: int) -> Tensor:
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    return (x * inverse.unsqueeze(-1)).round().clamp(-top, top - 1)


def _q6_k(x: Tensor) -> Tensor:
    groups = x.view(-1, 16, 16)
    scale = _symmetric(groups, 32)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    d = (largest / -128).half().float()
    s = torch.where(d == 0, 0.0, scale / torch.where(d == 0, 1.0, d)).round().clamp(-128, 127)

    def error(scales: Tensor) -> Tensor:
        real = d * scales
        return (_signed_codes(groups, real, 32) * real.unsqueeze(-1) - groups).square().sum(-1)

    for step in (-1, 1):
        other = (s + step).clamp(-128, 127)
        s = torch.where(error(other) < error(s), other, s)
    codes = (_signed_codes(groups, d * s, 32) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15) | (codes[:, :, 2:] & 15) << 4
    high = ((codes >> 4).int() << (2 * torch.arange(4))[:, None]).sum(2).to(torch.uint8)
    return torch.cat([low.flatten(1), high.flatten(1), s.to(torch.int8).view(torch.uint8), halves(d)], 1)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
