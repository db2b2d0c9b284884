"""Rotary positions: pairs of channels turn with the position (Su et al. 2021)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from cutaway.shapes import Angles, Positions
from cutaway.spec import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotarySpec,
    YarnScaling,
)


def speeds(spec: RotarySpec, longest: Tensor | None = None) -> tuple[Tensor, float]:
    """Radians a position for each pair, and the factor on cos and sin.

    Args:
        spec: the rotary positions.
        longest: tokens of the text, for scalings that ask; None is a short text. […]

    Returns:
        [d_rotary / 2], or [… d_rotary / 2] where the scaling asks for the length.
    """
    if not asks_length(spec):
        return _fixed_speeds(spec)
    return _speeds(spec, longest)


@lru_cache(maxsize=64)
def _fixed_speeds(spec: RotarySpec) -> tuple[Tensor, float]:
    with torch.device("cpu"), torch.inference_mode(False):
        return _speeds(spec, None)


def _speeds(spec: RotarySpec, longest: Tensor | None) -> tuple[Tensor, float]:
    pairs = torch.arange(0, spec.d_rotary, 2, dtype=torch.float32) / spec.d_rotary
    plain = 1.0 / (spec.base**pairs)
    match spec.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / factor, 1.0
        case FactorScaling(factors):
            return plain / torch.tensor(factors, dtype=torch.float32), 1.0
        case Llama3Scaling():
            return _llama3(plain, spec.scaling), 1.0
        case YarnScaling():
            return _yarn(spec.base**pairs, spec, spec.scaling), yarn_magnitude(spec.scaling)
        case DynamicScaling():
            return _dynamic(pairs, spec, spec.scaling, longest), 1.0
        case LongScaling() as scaling:
            lists = torch.tensor([scaling.short, scaling.long], dtype=torch.float32)
            which = torch.zeros(1) if longest is None else (longest.cpu() > scaling.original_max_positions)
            return 1.0 / (lists[which.long()] * spec.base**pairs), long_magnitude(scaling)


def _dynamic(pairs: Tensor, spec: RotarySpec, scaling: DynamicScaling, longest: Tensor | None) -> Tensor:
    original = scaling.original_max_positions
    length = torch.full((1,), original) if longest is None else longest.cpu().clamp(min=original)
    grown = scaling.factor * length.float() / original - (scaling.factor - 1)
    base = spec.base * grown ** (spec.d_rotary / (spec.d_rotary - 2))
    return 1.0 / (base[..., None] ** pairs)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    # How many turns a pair makes within the original length decides: many are kept, few are slowed.
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * plain / scaling.factor + ramp * plain


def _yarn(periods: Tensor, spec: RotarySpec, scaling: YarnScaling) -> Tensor:
    def pair_with(turns: float) -> float:
        length = scaling.original_max_positions / (turns * 2 * math.pi)
        return spec.d_rotary * math.log(length) / (2 * math.log(spec.base))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.d_rotary - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(spec.d_rotary // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp / (scaling.factor * periods) + (1 - ramp) / periods


def yarn_magnitude(scaling: YarnScaling) -> float:
    """The factor on cos and sin: as stated, or ``0.1 ln(factor) + 1`` (Peng et al. 2023, eq. 22).

    >>> round(yarn_magnitude(YarnScaling(factor=64.0, original_max_positions=4096)), 6)
    1.415888
    >>> yarn_magnitude(YarnScaling(factor=64.0, original_max_positions=4096, attention_factor=1.0))
    1.0
    """

    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def long_magnitude(scaling: LongScaling) -> float:
    """The factor on cos and sin: as stated, or by how much longer the text may be (Ding et al. 2024, section 3.3)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_positions))


def asks_length(spec: RotarySpec | None) -> bool:
    """Whether the speeds depend on how long the text is."""
    return spec is not None and isinstance(spec.scaling, DynamicScaling | LongScaling)


def text_lengths(positions: Positions, segments: Tensor | None = None) -> Tensor:
    """How long the text is that each token belongs to, as far as it has been read. [batch, query]"""
    if segments is None:
        return (positions.amax(1, keepdim=True) + 1).expand_as(positions)
    documents = torch.where(segments < 0, -1 - segments, segments)  # a prefix is part of its document
    rows = torch.arange(len(documents), device=documents.device)[:, None].expand_as(documents)
    _, place = torch.unique(torch.stack([rows, documents], -1).flatten(0, 1), dim=0, return_inverse=True)
    last = positions.new_full((place.numel(),), -1).scatter_reduce(0, place, positions.flatten(), "amax")
    return (last[place] + 1).view_as(positions)


def rotary_table(
    spec: RotarySpec, positions: Positions, dtype: torch.dtype, lengths: Tensor | None = None
) -> tuple[Angles, Angles]:
    """cos and sin of every pair's angle at every position; a pad's is that of position 0.

    In ``dtype``, or in fp32 where the spec casts after the turn.

    Args:
        spec: which pairs, how fast.
        positions: −1 for a pad. [batch, query]
        dtype: of the stream.
        lengths: of the text that each token belongs to; by default as far as ``positions`` tell. [batch, query]
    """
    dtype = torch.float32 if spec.cast == "after" else dtype
    if asks_length(spec) and lengths is None:
        lengths = text_lengths(positions)
    speed, magnitude = speeds(spec, lengths)
    angles = positions.clamp(min=0)[..., None].float() * speed.to(positions.device)
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Angles, sin: Angles, interleaved: bool = False) -> Tensor:
    """Turn each pair of channels by its angle; channels past the pairs stay.

    Pair i is channels i and i + half, or, interleaved, 2 i and 2 i + 1. [batch, query, head, d_head] → the same
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if interleaved:
        pairs = x[..., : 2 * half].unflatten(-1, (half, 2))
        first, second = pairs[..., 0], pairs[..., 1]
        turned = [torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
        turned = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > 2 * half:
        turned.append(x[..., 2 * half :])
    return torch.cat(turned, dim=-1).to(x.dtype)
