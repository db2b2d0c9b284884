"""Where in a quantity an edit takes hold, said in words that mean the same in every pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.inputs import plain

Some: TypeAlias = int | Sequence[int] | slice | Tensor  # one, several, or those from one to before another
Picked: TypeAlias = tuple[int, ...] | slice

TOKENS = ("query", "source")  # axes whose places are tokens that something is computed of
KEYS = ("key", "source_key", "source")  # and tokens that are read
# What picks along which of these axes.
AXES = {
    "heads": ("head", "kv_head"),
    "neurons": ("d_ff", "d_model", "d_head", "vocab", "label"),
    "experts": ("expert",),
    "rows": ("batch",),
}


def counted_along(axes: Sequence[str]) -> str | None:
    """The axis whose places are tokens that something is computed of: where there are queries, a source is only read.

    >>> counted_along(("batch", "head", "query", "source")), counted_along(("batch", "source", "kv_head", "d_head"))
    ('query', 'source')
    """
    return next((word for word in TOKENS if word in axes), None)


@dataclass(frozen=True, slots=True)
class Place:
    """What an edit is told of the tensor that it is given.

    Attributes:
        name: of the quantity.
        axes: the words for its axes.
        positions: where its tokens stand in their texts, −1 for a pad; of a source's quantities, in the source.
            [batch, query]
    """

    name: str
    axes: tuple[str, ...]
    positions: Tensor

    @property
    def tokens(self) -> int | None:
        """The axis of the tokens that ``positions`` are of; None where there is one vector a text."""
        word = counted_along(self.axes)
        return None if word is None else self.axes.index(word)

    @property
    def keys(self) -> int | None:
        """The axis of the tokens that are read: the n-th is the n-th of its text."""
        return next((i for i, word in enumerate(self.axes) if word in KEYS and i != self.tokens), None)

    def axis(self, what: str) -> int | None:
        """The axis along which ``what`` picks."""
        return self.keys if what == "keys" else next((self.axes.index(w) for w in AXES[what] if w in self.axes), None)


@dataclass(frozen=True, slots=True)
class Where:
    """Part of a quantity: see :func:`where`. None is all there is.

    Attributes:
        picks: what → its places, but for positions.
        positions: of tokens.
        each: of tokens, for each row its own.
    """

    picks: tuple[tuple[str, Picked], ...] = ()
    positions: Picked | None = None
    each: tuple[tuple[int, ...], ...] | None = None

    @property
    def everywhere(self) -> bool:
        """Whether it is any token."""
        return self.positions is None and self.each is None

    def mask(self, value: Tensor, place: Place) -> Tensor:
        """True where an edit takes hold, of a shape to be broadcast to the quantity's.

        Raises:
            RequestError: it has no such axis, or the axis no such place.
        """
        found = torch.ones((1,) * value.dim(), dtype=torch.bool, device=value.device)
        for what, picked in self.picks:
            axis = place.axis(what)
            if axis is None:
                hint = f"Its axes are {', '.join(place.axes)}."
                raise RequestError(f"has no {what} to pick", field=f"edits/{place.name}", hint=hint)
            line = torch.zeros(value.shape[axis], dtype=torch.bool)
            line[_indices(picked, value.shape[axis], what, place.name)] = True
            shape = [1] * value.dim()
            shape[axis] = len(line)
            found = found & line.view(shape).to(value.device)
        if not self.everywhere:
            axis = place.tokens
            if axis is None:
                hint = f"Its axes are {', '.join(place.axes)}."
                raise RequestError("has no positions to pick", field=f"edits/{place.name}", hint=hint)
            shape = [1] * value.dim()
            shape[0], shape[axis] = place.positions.shape
            found = found & self.tokens(place).view(shape).to(value.device)
        return found

    def tokens(self, place: Place) -> Tensor:
        """Which tokens are picked, by position alone. On the CPU. [batch, query]

        Raises:
            RequestError: not positions for each row.
        """
        at, given = place.positions.cpu(), self.positions
        if self.each is not None:
            if len(self.each) != len(at):
                what, got = "not positions for each row", f"{len(self.each)} lists"
                raise RequestError(what, field=f"edits/{place.name}", expected=f"{len(at)} lists", got=got)
            rows = [
                torch.isin(row, torch.tensor(mine, dtype=at.dtype)) for row, mine in zip(at, self.each, strict=True)
            ]
            return torch.stack(rows)
        if given is None:
            return at >= 0
        if isinstance(given, slice):
            last = torch.iinfo(at.dtype).max if given.stop is None else given.stop
            return (at >= (given.start or 0)) & (at < last)
        return torch.isin(at, torch.tensor(given, dtype=at.dtype))

    def met(self, value: Tensor, place: Place) -> set[tuple[str, int, int]]:
        """Which of its positions and keys there are in this pass, of the rows that are picked: (what, row, place)."""
        found: set[tuple[str, int, int]] = set()
        picks = dict(self.picks)
        if not self.everywhere:
            at, tokens = place.positions.cpu(), self.tokens(place)
            for row in _indices(picks.get("rows", slice(None)), value.shape[0], "rows", place.name):
                found |= {("positions", row, position) for position in at[row][tokens[row]].tolist()}
        if "keys" in picks and place.keys is not None:
            found |= {("keys", 0, key) for key in _indices(picks["keys"], value.shape[place.keys], "keys", place.name)}
        return found

    def unmet(self, met: set[tuple[str, int, int]]) -> tuple[str, str] | None:
        """What is picked and was in no pass: what, and which; None where all was."""
        picks = dict(self.picks)
        if self.each is not None:
            rows = {*_indices(picks.get("rows", slice(None)), len(self.each), "rows", "")}
            wanted = [(row, position) for row in sorted(rows) for position in self.each[row]]
            lost = [f"{position} of row {row}" for row, position in wanted if ("positions", row, position) not in met]
            if lost:
                return "positions", ", ".join(lost)
        for what, picked in (("positions", self.positions), ("keys", picks.get("keys"))):
            seen = {place for kind, _, place in met if kind == what}
            if picked is not None and (which := _unmet(picked, seen)):
                return what, which
        return None


def where(
    heads: Some | None = None,
    positions: Some | Sequence[Sequence[int]] | None = None,
    neurons: Some | None = None,
    rows: Some | None = None,
    keys: Some | None = None,
    experts: Some | None = None,
) -> Where:
    """Part of a quantity; what several of these say holds together.

    Args:
        heads: query heads; of ``k`` and ``v``, key/value heads.
        positions: of tokens in their texts, from 0, in whichever pass they come; a list of lists has each row's own.
        neurons: places of the last axis: neurons, or channels of a vector.
        rows: texts of the batch.
        keys: of ``scores`` and ``weights``, positions of the tokens that are read.
        experts: of a mixture.

    Raises:
        RequestError: not a whole number from 0, several of these, or a slice.
    """
    given = {"heads": heads, "neurons": neurons, "rows": rows, "keys": keys, "experts": experts}
    picks = tuple((what, _picked(what, some)) for what, some in given.items() if some is not None)
    if positions is None:
        return Where(picks)
    listed = plain(positions)
    nested = isinstance(listed, (list, tuple)) and [isinstance(plain(one), (list, tuple, range)) for one in listed]
    if nested and all(nested):
        each = [_picked("positions", one, empty=True) for one in listed]
        return Where(picks, each=tuple(one for one in each if isinstance(one, tuple)))
    return Where(picks, _picked("positions", positions))


def _picked(what: str, some: Any, empty: bool = False) -> Picked:
    """Checked, as a tuple or a slice."""
    found = plain(some)
    wanted = "whole numbers from 0, or a slice of them"
    if isinstance(found, slice):
        ends = [end for end in (found.start, found.stop) if end is not None]
        if any(not is_place(end) for end in ends) or found.step not in (None, 1):
            raise RequestError("not a slice of places", field=what, expected=wanted, got=found)
        return found
    places = tuple(found) if isinstance(found, (list, tuple, range)) else (found,)
    if not places and not empty:
        raise RequestError("nothing is picked", field=what, expected=wanted)
    for place in places:
        if not is_place(place):
            hint = "Places are counted from the beginning." if isinstance(place, int) and place < 0 else None
            raise RequestError("not a place", field=what, expected=wanted, got=place, hint=hint)
    return tuple(int(place) for place in places)


def is_place(value: object) -> bool:
    """Whether it counts from 0."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def _indices(picked: Picked, size: int, what: str, name: str) -> list[int]:
    """Places below ``size``. What is read grows from pass to pass, so a key that is not there yet is left out."""
    if what == "keys" and not isinstance(picked, slice):
        return [place for place in picked if place < size]
    found = [*range(size)[picked]] if isinstance(picked, slice) else [*picked]
    if what != "keys" and (not found or max(found) >= size):
        got = f"{picked.start or 0}…" if isinstance(picked, slice) else max(found)
        raise RequestError(f"there are no such {what}", field=f"edits/{name}", expected=f"0…{size - 1}", got=got)
    return found


def _unmet(picked: Any, met: set[int]) -> str:
    """Those that were not met; of a slice any one will do."""
    if isinstance(picked, slice):
        return "" if met else f"{picked.start or 0}…"
    return ", ".join(str(place) for place in picked if place not in met)
