"""From what was seen in each pass to one tensor of whole texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.inspection.where import Place


def joined(
    name: str,
    axes: tuple[str, ...],
    passes: Sequence[Tensor],
    positions: Sequence[Tensor],
    lengths: Sequence[int],
    key_lengths: Sequence[int],
) -> Tensor:
    """All passes as if it had been one: each row's tokens from its first, then nothing.

    "Nothing here" is NaN, in whole numbers −1. A key that there was when a later token was read, and not yet when
    this one was, weighs nothing: its score is −inf, its weight 0.

    Args:
        name, axes: of the quantity.
        passes: what it was in each.
        positions: where their tokens stand, −1 for a pad. [batch, query] of each
        lengths: tokens of each row, along the axis that is computed.
        key_lengths: along the axis that is read.
    """
    place = Place(name, axes, positions[0])
    axis, keys = place.tokens, place.keys
    if axis is None:
        return passes[0]
    longest = max(lengths)
    if keys is not None:
        most, weightless = max(key_lengths), float("-inf") if name.endswith("scores") else 0.0
        passes = [
            one if one.shape[-1] == most else F.pad(one, (0, most - one.shape[-1]), value=weightless) for one in passes
        ]
    level = all(bool((at >= 0).all()) for at in positions)
    whole = passes[0] if len(passes) == 1 else torch.cat([*passes], axis) if level else None
    if whole is None or whole.shape[axis] != longest:
        whole = _by_position(passes, positions, axis, longest)
    elif not level:
        whole = _without(whole, axis, lengths)
    if keys is not None and len(set(key_lengths)) > 1:
        whole = _without(whole, keys, key_lengths)
    return whole


def _by_position(passes: Sequence[Tensor], positions: Sequence[Tensor], axis: int, longest: int) -> Tensor:
    """Each token at its position; elsewhere nothing."""
    first = passes[0].movedim(axis, 1)
    out = _nothing(first, (len(first), longest, *first.shape[2:]))
    for one, at in zip(passes, positions, strict=True):
        rows, columns = (at >= 0).nonzero(as_tuple=True)
        out[rows, at[rows, columns]] = one.movedim(axis, 1)[rows, columns]
    return out.movedim(1, axis).contiguous()


def _without(whole: Tensor, axis: int, lengths: Sequence[int]) -> Tensor:
    """Nothing past each row's length."""
    shape = [1] * whole.dim()
    shape[0], shape[axis] = whole.shape[0], whole.shape[axis]
    ends = torch.tensor(lengths, device=whole.device)[:, None]
    past = torch.arange(whole.shape[axis], device=whole.device) >= ends
    return torch.where(past.view(shape), _nothing(whole, ()), whole)


def _nothing(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_full(shape, float("nan") if like.is_floating_point() else -1)
