"""The logit lens: what the head would say if the stream ended here (nostalgebraist 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids, whole
from cutaway.inspection.figure import Figure, Grid, Part, Rows
from cutaway.inspection.points import Kind, Translator, Vectors, default_points, point_names, short, vectors
from cutaway.inspection.readout import (
    Spell,
    blocks,
    contributed,
    labels,
    numbers,
    percent,
    read_out,
    scored,
    seen,
    token_head,
    whole_sum,
)
from cutaway.inspection.running import trace
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.steps import Progress, counted
from cutaway.inspection.target import places_in
from cutaway.models import Transformer

TOLD = ("tokens", "values", "target_value", "rank", "divergence", "entropy")

Target: TypeAlias = Literal["final", "next"] | int | Sequence[int]


@dataclass(frozen=True, slots=True, repr=False)
class Lens(Shown):
    """What each point of the stream would say, at each position.

    Of a *stream* the values are probabilities. Of a *part*, which was added to the stream, they are what it adds to the
    scores, the last norm's scale held at what it is in this text; it has no distribution, so what needs one is NaN.

    Attributes:
        points: a name each, of a head or an expert with its number.
        kinds: ``"stream"``, ``"translated"`` (by a tuned lens) or ``"part"``, each.
        ids: the text. positions: which of it are here. pieces: a text for each of these.
        tokens: the best tokens, and values, theirs. [point, position, k]
        target: the token that is followed, −1 where there is none. [position]
        target_value: its probability, or what is added to its score. [point, position]
        rank: tokens that stand before the target. −1 where there is none. [point, position]
        divergence: KL from the final distribution to that of the point, in nats. [point, position]
        entropy: of the point's distribution, in nats. [point, position]
        spell: how a token is written, if that is known.
        notes: what has to be said of it.
    """

    points: tuple[str, ...]
    kinds: tuple[Kind, ...]
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    pieces: tuple[str, ...]
    tokens: Tensor
    values: Tensor
    target: Tensor
    target_value: Tensor
    rank: Tensor
    divergence: Tensor
    entropy: Tensor
    notes: tuple[str, ...] = ()
    spell: Spell | None = field(default=None, repr=False, compare=False)

    def word(self, token: int) -> str:
        """A token as it is written, or its id."""
        return str(token) if self.spell is None else self.spell(token)

    def figure(self) -> Figure:
        """The best token of each point and position; how far it is from the end; how the target fares."""
        rows = [short(point) for point in self.points]
        streams = [i for i, kind in enumerate(self.kinds) if kind != "part"]
        others = [i for i, kind in enumerate(self.kinds) if kind == "part"]
        parts: list[Part] = []
        if streams and not others and len(self.positions) == 1:
            return Figure(f"Lens of “{self.pieces[0]}” (position {self.positions[0]})", [self._alone(rows)], self.notes)
        if streams:
            parts.append(self._grid("Likeliest token", streams, rows, self.values[..., 0], "share", best=True))
            parts.append(self._grid("Nats from the final distribution", streams, rows, self.divergence, "plain"))
        if others:
            parts.append(self._grid("Most raised token", others, rows, self.values[..., 0], "signed", best=True))
        if bool((self.target >= 0).any()):
            ranks = torch.where(self.rank < 0, float("nan"), self.rank.double())
            words = ", ".join(dict.fromkeys(self.word(t) for t in self.target.tolist() if t >= 0))
            said = f"“{words}”" if len(words) <= 60 else "the target"
            parts.append(self._grid(f"Tokens before {said}", [*streams, *others], rows, ranks, "plain"))
        return Figure("Lens", parts, self.notes)

    def _alone(self, points: list[str]) -> Rows:
        """Of one position: a row for each point."""
        target = int(self.target[0])
        followed = [] if target < 0 else [f"“{self.word(target)}”", "before it"]
        rows: list[list[str | int | float]] = []
        for i, point in enumerate(points):
            first, *then = self.tokens[i, 0, :4].tolist()
            rest = " ".join(seen(self.word(token)) for token in then)
            fares: list[str | int] = [percent(float(self.target_value[i, 0])), int(self.rank[i, 0])] if followed else []
            best = [self.word(first), percent(float(self.values[i, 0, 0])), rest]
            rows.append([point, *best, *fares, float(self.divergence[i, 0])])
        columns = ["layer", "says", "at", "then", *followed, "nats"]
        return Rows("What each layer would say, and its distance from the end in nats", columns, rows)

    def _grid(
        self,
        title: str,
        which: list[int],
        rows: list[str],
        values: Tensor,
        scale: Literal["share", "signed", "plain"],
        best: bool = False,
    ) -> Grid:
        texts = [[self.word(token) for token in row] for row in self.tokens[which][..., 0].tolist()] if best else None
        shown = [rows[i] for i in which]
        return Grid(title, shown, self.pieces, numbers(values[which].double()), texts, scale, "position", "layer")

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        shared = {"ids": [*self.ids], "positions": [*self.positions], "pieces": [*self.pieces]}
        words = {"words": [[[self.word(t) for t in ts] for ts in row] for row in self.tokens.tolist()]}
        tensors = {name: numbers(getattr(self, name)) for name in ("target", *TOLD)}
        head = {"points": [*self.points], "kinds": [*self.kinds]}
        return {**head, **shared, **tensors, **({} if self.spell is None else words), "notes": [*self.notes]}


@torch.no_grad()
def lens(
    model: Transformer,
    ids: Sequence[int],
    at: Sequence[str] | None = None,
    *,
    k: int = 5,
    target: Target = "final",
    positions: Sequence[int] | None = None,
    source: Sequence[int] | None = None,
    tuned: Translator | None = None,
    progress: Progress | bool | None = None,
    pieces: Sequence[str] | None = None,
    spell: Spell | None = None,
) -> Lens:
    """Read the stream before its end: the last norm, the head's matrix, its bias and cap, at each point.

    Args:
        model: with a head that scores tokens.
        ids: one text; of an encoder–decoder, what the decoder reads.
        at: names or patterns of what has the stream's form: ``resid_in``, ``resid``, and of what is added to it
            (``out``, ``head_out``, ``experts``, the embeddings). By default the stream before each layer, and the end.
        k: how many of the best tokens.
        target: the token whose rank and probability are followed: the likeliest at the end of each position
            (``"final"``), the one that comes next in the text (``"next"``), one token, or one for each position.
        positions: which to read; all by default. Negative ones count from the end.
        source: of an encoder–decoder, what its encoder reads.
        tuned: translates the stream where it knows how: see :func:`train_lens`.
        progress: called with how many vectors are done and how many there are; True for a line.
        pieces: a text for each token of ``ids``. spell: a token's id → how it is written.

    Raises:
        NameNotFound: a pattern matches nothing that can be read.
        RequestError: no head that scores tokens; parts of a stream that is no sum; a target or a position that is none.
    """
    token_head(model)
    ids = check_ids(ids, model.spec.vocab_size, "ids")
    k = min(whole("k", k, 1), model.spec.vocab_size)
    texts = labels(ids, pieces)
    places = places_in(len(ids), positions)
    if at is not None and not at:
        raise RequestError("no point was named", field="at", expected="at least one")
    if tuned is not None and not isinstance(tuned, Translator):
        raise RequestError("not a tuned lens", field="tuned", expected="one that train_lens made", got=tuned)
    end = f"{model.spec.main}.norm.out"
    wanted = default_points(model.spec) if at is None else point_names(model, at)
    seen = vectors(model, trace_of(model, ids, wanted, source), wanted, places, tuned)
    final = next(v for v in seen if v.name == end).x
    goal = _target(target, ids, places, _best(model, final) if target == "final" else None, model)
    shown = [v for v in seen if v.name != end or end in wanted]

    said: dict[str, list[Tensor]] = {name: [] for name in TOLD}
    with counted(progress, len(places) * len(shown), "vectors read") as report:
        for block in blocks(len(places), model.spec.vocab_size):
            last = scored(model, final[block]).log_softmax(-1)
            shares = last.exp()
            rows = []
            for v in shown:
                rows.append(_one(model, v, end, block, goal[block], last, shares, k))
                report(block.start * len(shown) + (block.stop - block.start) * len(rows), len(places) * len(shown))
            for name, into in said.items():
                into.append(torch.stack([row[name] for row in rows]))
    joined = {name: torch.cat(pieces_of, 1) for name, pieces_of in said.items()}
    return Lens(
        tuple(v.label for v in shown),
        tuple(v.kind for v in shown),
        tuple(ids),
        tuple(places),
        tuple(texts[place] for place in places),
        target=goal,
        notes=_notes(model, {v.kind for v in shown}),
        spell=spell,
        **joined,
    )


def trace_of(
    model: Transformer, ids: Sequence[int], names: Sequence[str], source: Sequence[int] | None
) -> Mapping[str, Tensor]:
    """What is needed of one text to read it at these points."""
    needed = dict.fromkeys((*names, f"{model.spec.main}.norm.out", *Vectors.needs(model, names)))
    return trace(model, [list(ids)], tuple(needed), sources=None if source is None else [list(source)])


def _one(
    model: Transformer, v: Vectors, end: str, block: slice, goal: Tensor, last: Tensor, shares: Tensor, k: int
) -> dict[str, Tensor]:
    """Everything that is said of one point and a block of positions. [position, …] each"""
    x = v.x[block]
    nothing = torch.full((len(x),), float("nan"))
    if v.kind == "part":
        scores = contributed(model, x)
        divergence, entropy = nothing, nothing
    else:
        scores = last if v.name == end else read_out(model, x).log_softmax(-1)
        divergence = (shares * (last - scores)).sum(-1).cpu()
        entropy = -(scores.exp() * scores).sum(-1).cpu()
    best = scores.topk(k, dim=-1)
    its = scores.gather(-1, goal.clamp(min=0)[:, None].to(scores.device))
    rank = (scores > its).sum(-1).cpu()
    value, values = (its[:, 0], best.values) if v.kind == "part" else (its[:, 0].exp(), best.values.exp())
    return {
        "tokens": best.indices.cpu(),
        "values": values.cpu(),
        "target_value": torch.where(goal < 0, float("nan"), value.cpu()),
        "rank": torch.where(goal < 0, -1, rank),
        "divergence": divergence,
        "entropy": entropy,
    }


def _best(model: Transformer, final: Tensor) -> Tensor:
    """The likeliest token at the end. [position]"""
    return torch.cat([scored(model, final[b]).argmax(-1) for b in blocks(len(final), model.spec.vocab_size)])


def _target(target: Target, ids: Sequence[int], places: list[int], final: Tensor | None, model: Transformer) -> Tensor:
    """The token to follow at each place, −1 for none."""
    if final is not None:
        return final.cpu()
    if target == "next":
        return torch.tensor([ids[place + 1] if place + 1 < len(ids) else -1 for place in places])
    if isinstance(target, str):
        raise RequestError("not a target", field="target", expected="final, next, a token or one for each", got=target)
    each = [target] * len(places) if isinstance(target, int) else list(target)
    if len(each) != len(places):
        raise RequestError("not a token for each position", field="target", expected=len(places), got=len(each))
    return torch.tensor(check_ids(each, model.spec.vocab_size, "target"))


def _notes(model: Transformer, kinds: set[Kind]) -> tuple[str, ...]:
    notes = []
    if "stream" in kinds:
        said = "The last norm and the head are the model's own; reading the stream before its end with them is an "
        notes.append(said + "approximation, worst in early layers (Belrose et al. 2023).")
        if not whole_sum(model):
            said = "This model norms the stream after each branch and has no last norm: a point is read as it stands "
            notes.append(said + "after the norm of its own branch, whose weights differ from those of the last.")
    if "translated" in kinds:
        notes.append("Translated points were brought to the end by a map that was trained; it is not the model's own.")
    if "part" in kinds:
        said = "Of parts: what each adds to the scores with the last norm's scale held, before a cap, "
        notes.append(said + "without biases of the norm and the head. This is what it writes, not what it causes.")
    return tuple(notes)
