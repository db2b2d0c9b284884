"""Edits by name: what the computation goes on with at some heads, positions or neurons; elsewhere it is as it was.

Each takes ``heads=``, ``positions=``, ``neurons=``, ``rows=``, ``keys=`` and ``experts=``, see
:func:`cutaway.inspection.where.where`, and may be given for a name or a pattern wherever edits are taken::

    trace(model, ids, ("logits",), {"decoder.layers.3.attn.z": zero(heads=[1, 4])})
    trace(model, ids, ("logits",), {"decoder.layers.5.resid_in": replace(clean, positions=4)})

An edit that takes hold of nothing, for there is no such head or the text never reaches that position, is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import flag, number
from cutaway.inspection.change import Change
from cutaway.inspection.trace import Trace
from cutaway.inspection.where import Place, Some, Where, where

Given: TypeAlias = float | Tensor | Trace


class At(TypedDict, total=False):
    """Where: see :func:`cutaway.inspection.where.where`."""

    heads: Some | None
    positions: Some | Sequence[Sequence[int]] | None
    neurons: Some | None
    rows: Some | None
    keys: Some | None
    experts: Some | None


def zero(**at: Unpack[At]) -> Change:
    """Nothing there. Of ``weights`` what is left is not made to sum to 1: for that, replace ``scores`` by −inf."""
    return Change("zero", where(**at), lambda value, place, mask: (value.new_zeros(()), None))


def scale(factor: float, **at: Unpack[At]) -> Change:
    """So many times what is there."""
    by = number("factor", factor)
    return Change("scale", where(**at), lambda value, place, mask: (value * by, None))


def add(given: Given, **at: Unpack[At]) -> Change:
    """What is there and as much more.

    Args:
        given: as for :func:`replace`; where a trace has nothing, nothing is added.
    """
    part = where(**at)

    def made(value: Tensor, place: Place, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        more, there = _numbers(given, value, place, part, mask)
        return value + more, there

    return Change("add", part, made)


def replace(given: Given, of: str | None = None, at: Sequence[int] | None = None, **part: Unpack[At]) -> Change:
    """Other numbers; those of another run are activation patching (Vig et al. 2020; Meng et al. 2022).

    Args:
        given: a number; a tensor, of the quantity's shape or to be broadcast to it, whose tokens, if it has more than
            one, are those of the text from its beginning; or a trace, whose quantity of the same name it is, row by
            row, or its only row in every row. Where a trace has no such position it stays as it was.
        of: of a trace, another name.
        at: of a trace, where it is taken from, for each of ``positions``.
        part: where it goes.
    """
    chosen = where(**part)
    moved = None if at is None else _moved(chosen, at)

    def made(value: Tensor, place: Place, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        return _numbers(given, value, place, chosen, mask, of, moved)

    return Change("replace", chosen, made)


def freeze(trace: Trace, **at: Unpack[At]) -> Change:
    """Held at what it was in another run, whatever comes before is; no gradient goes through it.

    Every token must be in the trace: where it ends, a run ends with an error.
    """
    part = where(**at)

    def made(value: Tensor, place: Place, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        found, there = _numbers(trace, value, place, part, mask, every=True)
        return found.detach(), there

    if not isinstance(trace, Trace):
        raise RequestError("no trace to hold it at", field="freeze", expected="a Trace", got=type(trace).__name__)
    return Change("freeze", part, made)


def mean(of: Tensor | Trace | None = None, **at: Unpack[At]) -> Change:
    """The mean over tokens, so that what tells one from another is gone (mean ablation).

    Args:
        of: a trace of other texts, whose quantity of the same name is averaged over all their tokens; or a mean that
            was made elsewhere. By default that of the row's own tokens: only where a text is read in one pass.
    """
    part = where(**at)
    known: dict[str, Tensor] = {}

    def made(value: Tensor, place: Place, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        if isinstance(of, Tensor):
            return _numbers(of, value, place, part, mask)
        tokens = place.tokens
        if tokens is None or place.keys is not None:
            what = "has no mean over tokens"
            raise RequestError(what, field=f"edits/{place.name}", got=", ".join(place.axes))
        if of is None:
            return _own_mean(value, place, tokens), None
        if place.name not in known:
            known[place.name] = of[place.name].nanmean((0, tokens), keepdim=True)
        return _fitting(known[place.name], value, place), None

    return Change("mean", part, made)


def steer(direction: Tensor, strength: float = 1.0, keep_length: bool = False, **at: Unpack[At]) -> Change:
    """Push vectors along a direction (Turner et al. 2023), at every token unless ``positions`` says where.

    Args:
        direction: such as the difference of two traces' means. [d_model], or as wide as the quantity
        strength: how many of it are added.
        keep_length: bring what comes of it back to the length that each vector had.
    """
    if not isinstance(direction, Tensor) or direction.dim() != 1:
        got = list(direction.shape) if isinstance(direction, Tensor) else type(direction).__name__
        raise RequestError("not a direction", field="direction", expected="a vector", got=got)
    by, keep = number("strength", strength), flag("keep_length", keep_length)

    def made(value: Tensor, place: Place, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        pushed = value + by * _fitting(direction, value, place)
        if keep:
            pushed = F.normalize(pushed, dim=-1) * value.norm(dim=-1, keepdim=True)
        return pushed, None

    return Change("steer", where(**at), made)


def _numbers(
    given: Given,
    value: Tensor,
    place: Place,
    part: Where,
    mask: Tensor,
    of: str | None = None,
    moved: dict[int, int] | None = None,
    every: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """New numbers, and where there are any.

    Raises:
        RequestError: of another shape, of other rows, or a trace without what is picked by position.
    """
    if not isinstance(given, (Tensor, Trace)):
        found = given if given in (math.inf, -math.inf) else number("given", given)
        return value.new_tensor(found), None
    axis = place.tokens
    if isinstance(given, Tensor) and (axis is None or given.dim() != value.dim() or given.shape[axis] == 1):
        return _fitting(given, value, place), None
    whole = given[of or place.name] if isinstance(given, Trace) else given
    if axis is None:
        return _fitting(whole, value, place), None
    if whole.dim() != value.dim() or len(whole) not in (1, len(value)):
        raise _unlike(whole, value, place)
    lengths = [whole.shape[axis]] * len(whole)
    if isinstance(given, Trace):
        lengths = given.source_lengths if place.axes[axis] == "source" else given.lengths  # type: ignore[assignment]
    at = place.positions.to(value.device)
    if moved is not None:
        keys = torch.tensor([*moved], device=at.device)
        hits = at[..., None] == keys
        at = torch.where(hits.any(-1), torch.tensor([*moved.values()], device=at.device)[hits.int().argmax(-1)], -1)
    ends = torch.tensor(lengths, device=at.device)[:, None]
    there = (at >= 0) & (at < ends)
    shape = [1] * value.dim()
    shape[0], shape[axis] = at.shape
    exact = every or part.each is not None or isinstance(part.positions, tuple)
    if exact and bool((mask & ~(there | (place.positions < 0).to(there.device)).view(shape)).any()):
        hint = f"It has {max(lengths)} tokens." if moved is None else None
        raise RequestError("the trace ends before what is picked", field=f"edits/{place.name}", hint=hint)
    rows = torch.arange(len(at), device=at.device)[:, None] if len(whole) > 1 else torch.zeros_like(at)
    picked = whole.to(value).movedim(axis, 1)[rows, at.clamp(0, whole.shape[axis] - 1)].movedim(1, axis)
    return _fitting(_keys(picked, value, place), value, place), there.view(shape)


def _keys(picked: Tensor, value: Tensor, place: Place) -> Tensor:
    """Of as many keys as the quantity has; those that were not there weigh nothing."""
    if place.keys is None:
        return picked
    nothing = -math.inf if place.name.endswith("scores") else 0.0
    n = value.shape[place.keys]
    picked = picked.narrow(place.keys, 0, min(n, picked.shape[place.keys]))
    short = n - picked.shape[place.keys]
    if short:
        shape = [*picked.shape]
        shape[place.keys] = short
        picked = torch.cat([picked, picked.new_full(shape, nothing)], place.keys)
    return torch.where(picked.isnan(), nothing, picked)


def _fitting(given: Tensor, value: Tensor, place: Place) -> Tensor:
    """Numbers that can be broadcast to the quantity's shape."""
    try:
        if torch.broadcast_shapes(given.shape, value.shape) == value.shape:
            return given.to(value)
    except RuntimeError:
        pass
    raise _unlike(given, value, place)


def _unlike(given: Tensor, value: Tensor, place: Place) -> RequestError:
    wanted = f"{list(value.shape)} ({', '.join(place.axes)})"
    return RequestError("does not fit there", field=f"edits/{place.name}", expected=wanted, got=list(given.shape))


def _moved(part: Where, at: Any) -> dict[int, int]:
    """Position here → position in the trace."""
    here, there = part.positions, where(positions=at).positions
    if not isinstance(here, tuple) or not isinstance(there, tuple) or len(here) != len(there):
        raise RequestError("not a place for each position", field="at", expected=here, got=at)
    if len({*here}) != len(here):
        what = "a position is named twice, with a place for each"
        raise RequestError(what, field="positions", expected="each once", got=list(here))
    return dict(zip(here, there, strict=True))


def _own_mean(value: Tensor, place: Place, axis: int) -> Tensor:
    """Over each row's own tokens. The token axis is 1 long."""
    at = place.positions.to(value.device)
    if bool((at.amin(1) > 0).any()):
        hint = "Give mean a trace, or the mean itself."
        raise RequestError("only part of the text is in this pass", field=f"edits/{place.name}", hint=hint)
    shape = [1] * value.dim()
    shape[0], shape[axis] = at.shape
    real = (at >= 0).view(shape)
    return torch.where(real, value, 0.0).sum(axis, keepdim=True) / real.sum(axis, keepdim=True).clamp(min=1)
