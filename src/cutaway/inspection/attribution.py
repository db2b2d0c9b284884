"""How much each token of a text counts for an answer, as data and as pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cutaway.inspection.figure import Figure, Words
from cutaway.inspection.shown import Shown, for_json


@dataclass(frozen=True, slots=True, repr=False)
class Attribution(Shown):
    """A number for each token that was read.

    Attributes:
        method: how it was found.
        what: the number that is explained, in words.
        value: that number.
        values: how much each token counts. [query]
        pieces: a text for each token.
        channels: the same for each channel of its vector, where the method has that. [query, d_model]
        source_values, source_pieces, source_channels: the same of an encoder–decoder's source.
        baseline: the number at what the method compares with, if it does.
        gap: what the values fall short of, where they ought to add up to ``value − baseline``.
        notes: what is the model's own and what is an approximation.
    """

    method: str
    what: str
    value: float
    values: Tensor
    pieces: tuple[str, ...]
    channels: Tensor | None = field(default=None, repr=False)
    source_values: Tensor | None = None
    source_pieces: tuple[str, ...] = ()
    source_channels: Tensor | None = field(default=None, repr=False)
    baseline: float | None = None
    gap: float | None = None
    notes: tuple[str, ...] = ()

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, without the channels."""
        found: dict[str, Any] = {
            "method": self.method,
            "what": self.what,
            "value": self.value,
            "pieces": list(self.pieces),
            "values": self.values.tolist(),
            "baseline": self.baseline,
            "gap": self.gap,
            "notes": list(self.notes),
        }
        if self.source_values is not None:
            found |= {"source_pieces": list(self.source_pieces), "source_values": self.source_values.tolist()}
        return found

    def figure(self) -> Figure:
        """The text, coloured; of an encoder–decoder the source before it."""
        signed = bool((self.values < 0).any()) or self.baseline is not None
        parts = []
        if self.source_values is not None:
            signed = signed or bool((self.source_values < 0).any())
            parts.append(self._words("source", self.source_pieces, self.source_values, signed))
        parts.append(self._words("text", self.pieces, self.values, signed))
        return Figure(f"{self.method}: {self.what} ({self.value:.4g})", parts, self.notes)

    def _words(self, title: str, pieces: tuple[str, ...], values: Tensor, signed: bool) -> Words:
        return Words(title, pieces, values.tolist(), unit=self.method, scale="signed" if signed else "plain")
