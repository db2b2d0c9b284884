"""The tables of tokens: nearest rows, analogies, and planes that show given words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids, whole
from cutaway.inspection.figure import Bars, Figure, Part, Rows
from cutaway.inspection.listed import listed
from cutaway.inspection.readout import Spell, blocks, labels, rows_of, table_of
from cutaway.inspection.shown import Shown, for_json
from cutaway.models import Transformer

By: TypeAlias = Literal["cosine", "dot", "euclid"]
Table: TypeAlias = Literal["input", "output", "source"]
_UNITS = {"cosine": "cosine", "dot": "dot product", "euclid": "distance"}


@dataclass(frozen=True, slots=True, repr=False)
class Neighbours(Shown):
    """Rows of a table that are nearest to a vector, the nearest first.

    Attributes:
        what: what was looked for, in words.
        tokens: whose rows. values: how alike each is, or how far.
        by: ``"cosine"`` and ``"dot"`` (more is nearer), ``"euclid"`` (less is nearer).
        table: ``"input"``, ``"output"`` or ``"source"``.
        spell: how a token is written, if that is known.
    """

    what: str
    tokens: tuple[int, ...]
    values: tuple[float, ...]
    by: By
    table: Table
    spell: Spell | None = field(default=None, repr=False, compare=False)

    @property
    def words(self) -> list[str]:
        """The tokens as they are written, or their ids."""
        return [str(t) if self.spell is None else self.spell(t) for t in self.tokens]

    def figure(self) -> Figure:
        """Bars."""
        scale: Literal["signed", "plain"] = "signed" if self.by == "cosine" else "plain"
        bars = Bars(f"Nearest rows of the {self.table} table", self.words, self.values, _UNITS[self.by], scale)
        note = "Rows are the model's own; a neighbour is a token that it starts with alike, or scores alike at the end."
        return Figure(self.what, (bars,), (note,))

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        words = {} if self.spell is None else {"words": self.words}
        found = {"tokens": [*self.tokens], **words, "values": [*self.values]}
        return {"what": self.what, "table": self.table, "by": self.by, **found}


@torch.no_grad()
def neighbours(
    model: Transformer,
    of: int | Tensor,
    *,
    k: int = 10,
    by: By = "cosine",
    table: Table = "input",
    leave_out: Sequence[int] = (),
    what: str | None = None,
    spell: Spell | None = None,
) -> Neighbours:
    """The rows of a table of tokens that are nearest to a token's row, or to a vector.

    Args:
        model: whose table.
        of: a token, which is itself left out, or a vector. [d_model]
        k: how many.
        by: by angle, by product, or by distance.
        table: ``"input"`` (what tokens become), ``"output"`` (what they are scored by), or the ``"source"``'s own.
        leave_out: tokens not to be named.
        what: words for the title. spell: a token's id → how it is written.

    Raises:
        RequestError: no such token, table or way; a vector of another size.
    """
    if by not in _UNITS:
        raise RequestError("no such likeness", field="by", expected="cosine, dot or euclid", got=by)
    rows = table_of(model, table)
    k = min(whole("k", k, 1), rows.shape[0])
    if isinstance(of, Tensor):
        if of.is_complex():
            raise RequestError("not a vector of the stream", field="of", expected="real numbers", got=of.dtype)
        vector, said, left = of.detach().float().reshape(-1).to(rows.device), "a vector", [*leave_out]
    else:
        (token,) = check_ids([of], rows.shape[0], "of")
        vector, said = rows_of(rows, [token])[0], str(token) if spell is None else f"“{spell(token)}”"
        left = [*leave_out, token]
    if vector.shape != (rows.shape[1],) or not bool(vector.isfinite().all()):
        wanted = f"{rows.shape[1]} finite numbers"
        raise RequestError("not a vector of the stream", field="of", expected=wanted, got=list(vector.shape))
    if by == "cosine" and not bool(vector.any()):
        raise RequestError("a vector of zeros has no direction", field="of", hint="by='euclid' asks for distances.")
    left = check_ids(left, rows.shape[0], "leave_out") if left else []
    score = _nearness(rows, vector, by)
    order = -score if by == "euclid" else score
    order[left] = float("-inf")
    best = order.topk(k).indices
    best = best[order[best] > float("-inf")]
    values = tuple(score[best].tolist())
    return Neighbours(what or f"Nearest to {said}", tuple(best.tolist()), values, by, table, spell)


def analogy(
    model: Transformer,
    a: int,
    b: int,
    c: int,
    *,
    k: int = 10,
    by: By = "cosine",
    table: Table = "input",
    spell: Spell | None = None,
) -> Neighbours:
    """What ``a − b + c`` is near, the three left out (Mikolov et al. 2013): king − man + woman.

    For angles each of the three is first brought to length 1 (Levy & Goldberg 2014).

    Args:
        model: whose table.
        a, b, c: tokens.
        k, by, table, spell: see :func:`neighbours`.
    """
    rows = table_of(model, table)
    three = rows_of(rows, check_ids([a, b, c], rows.shape[0], "tokens"))
    if by == "cosine":
        three = three / three.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    vector = three[0] - three[1] + three[2]
    words = [str(t) if spell is None else f"“{spell(t)}”" for t in (a, b, c)]
    what = "{} − {} + {}".format(*words)
    return neighbours(model, vector, k=k, by=by, table=table, leave_out=[a, b, c], what=what, spell=spell)


@dataclass(frozen=True, slots=True, repr=False)
class Plane(Shown):
    """Words as points of a plane.

    Attributes:
        tokens: the words. labels: a text each.
        points: where each is. [word, 2]
        axes: the directions of the plane, of length 1. [2, d_model]
        named: what each axis is.
        share: of the words' variance, what each axis shows.
        table: ``"input"``, ``"output"`` or ``"source"``.
    """

    tokens: tuple[int, ...]
    labels: tuple[str, ...]
    points: Tensor
    axes: Tensor
    named: tuple[str, str]
    share: tuple[float, float]
    table: Table

    def figure(self) -> Figure:
        """A table of the words and where they are."""
        columns = ["word", *(f"{name} ({share:.0%})" for name, share in zip(self.named, self.share, strict=True))]
        places: list[list[str | float]] = [
            [word, *at] for word, at in zip(self.labels, self.points.tolist(), strict=True)
        ]
        parts: list[Part] = [Rows(f"Words in the {self.table} table", columns, places)]
        shown = f"The plane shows {sum(self.share):.0%} of what these words differ by; points that are close in it may"
        return Figure("A plane of words", parts, (f"{shown} be far apart.",))

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        words = {"tokens": [*self.tokens], "labels": [*self.labels], "points": self.points.tolist()}
        return {**words, "axes": [*self.named], "share": [*self.share], "table": self.table}


@torch.no_grad()
def plane(
    model: Transformer,
    tokens: Sequence[int],
    *,
    pairs: Sequence[tuple[int, int]] | None = None,
    table: Table = "input",
    pieces: Sequence[str] | None = None,
    spell: Spell | None = None,
) -> Plane:
    """A plane through a table that shows given words.

    Args:
        model: whose table.
        tokens: the words, three or more.
        pairs: what the axes are, as one or two pairs of words: each runs from the first to the second, the second axis
            made square to the first; the first pair's middle is the origin. Where there is one pair, the other axis is
            what the words differ by most beside it. By default both are what they differ by most (PCA).
        table: see :func:`neighbours`.
        pieces: a label for each word. spell: a token's id → how it is written.

    Raises:
        RequestError: too few words, or pairs that span no plane.
    """
    rows = table_of(model, table)
    ids = check_ids(tokens, rows.shape[0], "tokens")
    if len(ids) < 3:
        raise RequestError("too few words for a plane", field="tokens", expected="at least 3", got=len(ids))
    write = spell or str
    shown = labels(ids, pieces) if pieces is not None else [write(t) for t in ids]
    x = rows_of(rows, ids)
    centred = x - x.mean(0)
    axes: list[Tensor] = []
    named: list[str] = []
    middle = x.mean(0)
    for pair in () if pairs is None else listed("pairs", pairs, "pairs of words"):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise RequestError("not a pair of words", field="pairs", expected="two each", got=pair)
        a, b = pair
        ends = rows_of(rows, check_ids([a, b], rows.shape[0], "pairs"))
        middle = ends.mean(0) if not axes else middle
        axes.append(_unit(ends[1] - ends[0], axes))
        named.append(f"{write(a)} → {write(b)}")
    if len(axes) > 2:
        raise RequestError("too many pairs for a plane", field="pairs", expected="one or two", got=len(axes))
    while len(axes) < 2:
        rest = centred - sum((centred @ axis)[:, None] * axis for axis in axes) if axes else centred
        first = torch.linalg.svd(rest, full_matrices=False).Vh[0]
        # Which way an axis points says nothing: the first word that is off the middle stands on its positive side.
        side = (rest @ first)[(rest @ first).abs().argmax()]
        axes.append(_unit(first if side >= 0 else -first, axes))
        named.append(f"component {len(axes)}")
    both = torch.stack(axes)
    total = float(centred.pow(2).sum())
    share = [float((centred @ axis).pow(2).sum()) / total if total else 0.0 for axis in both]
    points = (x - middle) @ both.t()
    return Plane(tuple(ids), tuple(shown), points, both, (named[0], named[1]), (share[0], share[1]), table)


def _unit(x: Tensor, square_to: Sequence[Tensor]) -> Tensor:
    """The part of a direction that is square to others, of length 1."""
    long = float(x.norm())
    for other in square_to:
        x = x - (x @ other) * other
    if float(x.norm()) <= 1e-6 * max(long, 1e-30):
        raise RequestError("these words span no plane", field="pairs", hint="Give words that differ.")
    return x / x.norm()


def _nearness(rows: Tensor, vector: Tensor, by: By) -> Tensor:
    """How alike each row is, a block of them at a time: no more of a stored table is made at once. [vocab]"""
    found = []
    for block in blocks(rows.shape[0], rows.shape[1]):
        some = rows_of(rows, block)
        if by == "euclid":
            found.append((some - vector).norm(dim=-1))
            continue
        product = some @ vector
        if by == "cosine":
            product = product / (some.norm(dim=-1) * vector.norm()).clamp(min=1e-12)
        found.append(product)
    return torch.cat(found)
