"""What an edit does to an answer: the same text with it and without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import tokens, whole
from cutaway.inspection.change import Edit
from cutaway.inspection.figure import Figure, Part, Rows
from cutaway.inspection.listed import listed
from cutaway.inspection.readout import Spell, percent
from cutaway.inspection.running import trace
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.target import place_in
from cutaway.models import Transformer
from cutaway.spec import ClassifierSpec
from cutaway.spec.names import tap_names


@dataclass(frozen=True, slots=True, repr=False)
class Effect(Shown):
    """The answer at one token without an edit and with it.

    Attributes:
        edited: names or patterns of what was edited.
        position: of the token; None where the answer is of the whole text.
        tokens: the likeliest of either run, and what was asked for; of a classifier, labels' numbers.
        words: a text for each.
        before, after: log-probability of each, in nats.
        divergence: KL from the answer without to that with the edit, in nats.
    """

    edited: tuple[str, ...]
    position: int | None
    tokens: tuple[int, ...]
    words: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    divergence: float
    spell: Spell | None = field(default=None, repr=False, compare=False)

    def figure(self) -> Figure:
        """A row for each token, the likeliest before first."""
        shares = torch.tensor([self.before, self.after]).exp().tolist()
        rows: list[list[str | int | float]] = [
            [word, percent(shares[0][i]), percent(shares[1][i]), round(self.after[i] - self.before[i], 3)]
            for i, word in enumerate(self.words)
        ]
        parts: list[Part] = [Rows("The answer", ["token", "before", "after", "change in nats"], rows)]
        notes = [
            "Both are the model's own answers.",
            "What an edit breaks, others may make up for; and a model with one may be unlike anything it was trained "
            "to be.",
        ]
        title = f"Edited: {', '.join(self.edited)}; the answers are {self.divergence:.3g} nats apart (KL)"
        return Figure(title, parts, notes)

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        each = {"tokens": [*self.tokens], "words": [*self.words], "before": [*self.before], "after": [*self.after]}
        return {"edited": [*self.edited], "position": self.position, **each, "divergence": self.divergence}


@torch.no_grad()
def effect(
    model: Transformer,
    ids: Sequence[int],
    edits: Mapping[str, Edit],
    *,
    k: int = 5,
    also: Sequence[int] = (),
    position: int | None = None,
    source: Sequence[int] | None = None,
    spell: Spell | None = None,
) -> Effect:
    """Run a text twice, and put the answers beside one another.

    Args:
        model: one that scores tokens or labels.
        ids: of one text; of an encoder–decoder, what its decoder reads.
        edits: as of :func:`trace`.
        k: how many of the likeliest of either run. also: tokens to tell of in any case.
        position: of the token that answers; the last by default.
        source: of an encoder–decoder, what its encoder reads.
        spell: a token's id → how it is written.

    Raises:
        RequestError: the model scores nothing, no such position; an edit that takes hold of nothing.
        NameNotFound: an edit's pattern matches nothing.
    """
    if not isinstance(edits, Mapping) or not edits:
        raise RequestError("nothing is edited", field="edits", expected="name → edit", got=edits)
    wanted = listed("also", also, "tokens")
    if "logits" not in tap_names(model.spec):
        raise RequestError("this model scores nothing", field="head", hint="trace() has every quantity after an edit.")
    sources = None if source is None else [list(source)]
    runs = [trace(model, [list(ids)], ("logits",), some, sources=sources)["logits"][0] for some in (None, edits)]
    place = None if runs[0].dim() == 1 else place_in(len(runs[0]), position)
    two: list[Tensor] = [(run if place is None else run[place]).float().log_softmax(-1).cpu() for run in runs]
    if bool(two[1].isnan().any()) and not bool(two[0].isnan().any()):
        raise RequestError("the edit leaves an answer that is no number", field="edits", got="NaN")
    k = min(whole("k", k, 1), len(two[0]))
    best = [one.topk(k).indices.tolist() for one in two]
    chosen = list(dict.fromkeys([*best[0], *best[1], *tokens("also", wanted, len(two[0]))]))
    labels = model.spec.head.labels if isinstance(model.spec.head, ClassifierSpec) else ()
    write = labels.__getitem__ if labels else (spell or str)
    return Effect(
        edited=tuple(edits),
        position=place,
        tokens=tuple(chosen),
        words=tuple(write(token) for token in chosen),
        before=tuple(two[0][chosen].tolist()),
        after=tuple(two[1][chosen].tolist()),
        # What has no probability before adds nothing, whatever it has after.
        divergence=float(torch.where(two[0] > float("-inf"), two[0].exp() * (two[0] - two[1]), 0.0).sum()),
        spell=spell,
    )
