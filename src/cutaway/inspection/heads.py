"""What each head looks at, as numbers: the token before, itself again, what came after itself, the first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import whole
from cutaway.inspection.figure import Figure, Grid, Part, Rows, Scale
from cutaway.inspection.listed import listed
from cutaway.inspection.readout import numbers
from cutaway.inspection.running import trace
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.sites import check_texts
from cutaway.models import Transformer
from cutaway.spec import AttentionSpec

NOT_WHY = "Attention weights say where a head reads, not what it does with that: they are no explanation."

SCORES = ("previous", "duplicate", "induction", "sink", "entropy", "distance")
MEANING = {
    "previous": "weight on the token before",
    "duplicate": "weight on earlier occurrences of the same token",
    "induction": "weight on tokens that followed earlier occurrences of the same token",
    "sink": "weight on the first token",
    "entropy": "of the weights, in nats",
    "distance": "mean distance to what is read, in tokens",
    "copying": "how far it writes the token that it reads",
}

Rule: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, repr=False)
class Heads(Shown):
    """A score of each kind for every head.

    Attributes:
        layers: the branches, in order: ``decoder.layers.3.attn``.
        scores: kind → score, NaN where there is no such head or the kind has no meaning. [layer, head]
        notes: what has to be said of it.
    """

    layers: tuple[str, ...]
    scores: dict[str, Tensor]
    notes: tuple[str, ...] = ("Scores are means over the model's own weights on these texts.", NOT_WHY)

    def top(self, kind: str, n: int = 10) -> list[tuple[str, int, float]]:
        """The heads that score highest: (layer, head, score).

        Raises:
            RequestError: no such kind; n is not a whole number from 0.
        """
        if kind not in self.scores:
            raise RequestError("no such score", field="kind", expected=", ".join(self.scores), got=kind)
        flat = self.scores[kind].flatten().nan_to_num(nan=float("-inf"))
        width = self.scores[kind].shape[1]
        best = flat.topk(min(whole("n", n, 0), len(flat))).indices.tolist()
        return [(self.layers[i // width], i % width, float(flat[i])) for i in best if flat[i] > float("-inf")]

    def figure(self) -> Figure:
        """A grid for each kind, and the best heads."""
        parts: list[Part] = []
        heads = [str(i) for i in range(next(iter(self.scores.values())).shape[1])]
        told = [kind for kind in ("previous", "duplicate", "induction", "copying") if kind in self.scores]
        best: list[list[str | int | float]] = [[kind, *one] for kind in told for one in self.top(kind, 3)]
        if best:
            parts.append(Rows("The highest", ["score", "layer", "head", "value"], best))
        for kind, values in self.scores.items():
            scale: Scale = "share" if kind in SCORES[:4] else "signed" if kind == "copying" else "plain"
            title = f"{kind.capitalize()}: {MEANING[kind]}"
            parts.append(Grid(title, self.layers, heads, numbers(values), None, scale, "head", "layer"))
        return Figure("Heads", parts, self.notes)

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        scores = {kind: numbers(values) for kind, values in self.scores.items()}
        return {"layers": [*self.layers], "scores": scores, "notes": [*self.notes]}


@torch.no_grad()
def head_scores(
    model: Transformer, ids: Sequence[Sequence[int]], *, sources: Sequence[Sequence[int]] | None = None
) -> Heads:
    """Score every head of every layer on texts, from the weights of its attention.

    A score is a mean over the positions where it can be had: of ``previous`` all but the first, of ``duplicate`` and
    ``induction`` those whose token stood earlier (and was followed by something). In an encoder, which reads both
    ways, "earlier" still means earlier. Of cross-attention, whose keys are of another text, there are ``sink`` and
    ``entropy``.

    Args:
        model: any with attention.
        ids: texts of one length; see :func:`repeated`. sources: of an encoder–decoder.

    Raises:
        RequestError: rows of different lengths, or too short to score.
    """
    rows = check_texts(model, "ids", ids)
    if len(rows[0]) < 2:
        raise RequestError("too short to score", field="ids", expected="at least 2 tokens", got=len(rows[0]))
    read = None if sources is None else check_texts(model, "sources", sources, of_source=True)
    places = [
        (f"{stack}.layers.{i}.{branch.name}", branch.body, stack)
        for stack, spec in model.spec.stacks.items()
        for i, layer in enumerate(spec.layers)
        for branch in layer.branches
        if isinstance(branch.body, AttentionSpec)
    ]
    width = max((body.n_heads for _, body, _ in places), default=0)
    if not places:
        raise RequestError("this model has no attention", field="model")
    scores = {kind: torch.full((len(places), width), float("nan")) for kind in SCORES}
    watched: dict[str, Rule] = {}
    for i, (at, body, stack) in enumerate(places):
        of_source = stack == "encoder" and model.spec.source is not None
        text = torch.tensor(read if of_source and read is not None else rows)

        # Read on the way and let go: a whole layer's weights are there only while the layer is.
        def watch(weights: Tensor, i: int = i, text: Tensor = text, cross: bool = body.cross) -> Tensor:
            for kind, value in (_crossed(weights) if cross else _scored(weights, text)).items():
                scores[kind][i, : len(value)] = value
            return weights

        watched[f"{at}.weights"] = watch
    trace(model, rows, (), edits=watched, sources=read)
    return Heads(tuple(at for at, _, _ in places), scores)


def _scored(weights: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Every kind, for each head. [batch, head, query, key], [batch, query] → [head]"""
    weights = weights.float().cpu()
    n = ids.shape[1]
    places = torch.arange(n)
    before = places[None, :] < places[:, None]  # [query, key]
    again = (ids[:, :, None] == ids[:, None, :]) & before
    # A key follows an earlier occurrence where the key before it is one.
    after = torch.zeros_like(again)
    after[:, :, 1:] = again[:, :, :-1]
    after &= places[None, :] <= places[:, None]
    distance = (places[:, None] - places[None, :]).abs().float()
    return {
        "previous": weights.diagonal(-1, 2, 3).mean((0, 2)),
        "duplicate": _on(weights, again),
        "induction": _on(weights, after),
        "sink": weights[:, :, 1:, 0].mean((0, 2)),
        "entropy": torch.special.entr(weights).sum(-1).mean((0, 2)),
        "distance": (weights * distance).sum(-1).mean((0, 2)),
    }


def _on(weights: Tensor, pattern: Tensor) -> Tensor:
    """The mean weight on the keys of a pattern, over queries that have such keys; NaN where there are none. [head]"""
    has = pattern.any(-1)
    on = (weights * pattern[:, None]).sum(-1)  # [batch, head, query]
    return (on * has[:, None]).sum((0, 2)) / has.sum() if bool(has.any()) else torch.full(on.shape[1:2], float("nan"))


def _crossed(weights: Tensor) -> dict[str, Tensor]:
    weights = weights.float().cpu()
    return {"sink": weights[..., 0].mean((0, 2)), "entropy": torch.special.entr(weights).sum(-1).mean((0, 2))}


def repeated(
    vocab: int | Sequence[int],
    length: int = 50,
    rows: int = 4,
    *,
    times: int = 2,
    seed: int = 0,
    first: int | None = None,
) -> list[list[int]]:
    """Random tokens, then the same again: what only induction can foresee (Olsson et al. 2022).

    Args:
        vocab: how many tokens there are, or which may be drawn.
        length: of what is repeated. rows: how many texts. times: how often it stands there.
        seed: the same seed, the same texts.
        first: a token that goes before all, such as one that begins texts.
    """
    whole("length", length, 1)
    whole("rows", rows, 1)
    whole("times", times, 1)
    whole("seed", seed, -(1 << 63), (1 << 63) - 1)
    every = range(vocab) if isinstance(vocab, int) else listed("vocab", vocab, "tokens")
    if not every:
        raise RequestError("there is nothing to draw from", field="vocab", expected="at least one token", got=vocab)
    some = torch.tensor([*every])
    drawn = some[torch.randint(len(some), (rows, length), generator=torch.Generator().manual_seed(seed))]
    lead = [] if first is None else [first]
    return [[*lead, *(row * times)] for row in drawn.tolist()]
