"""What a number is made of, as data and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from cutaway.generation.checks import whole
from cutaway.inspection.figure import Bars, Figure, Grid, Part
from cutaway.inspection.shown import Shown, for_json

PartKind: TypeAlias = Literal["embedding", "head", "feed-forward", "expert", "bias"]
SHOWN = 20  # bars at most


@dataclass(frozen=True, slots=True)
class Share:
    """What one part adds.

    Attributes:
        name: of the part, such as ``decoder.layers.3.attn.heads.2``.
        kind: what it is.
        layer: which layer it is in, if any.
        value: what it adds, in units of the number that is explained.
    """

    name: str
    kind: PartKind
    layer: int | None
    value: float


@dataclass(frozen=True, slots=True, repr=False)
class Decomposition(Shown):
    """A number as the sum of what every part of the model adds to it.

    Attributes:
        what: the number in words.
        position: where in the text.
        at: the point of the stream that was read; ``"end"`` after the last layer.
        shares: every part, in the order of the computation.
        value: the number as the model computed it; a logit before its cap.
        capped: the logit after its cap, where there is one.
        held: names of the norms whose scale was held at what it was.
        neurons: feed-forward branch → what each neuron adds. [d_ff], of experts [expert, d_ff]
        sources: attention branch → what each head adds from each position that it read. [head, key]
        pieces: a text for each position, and one for each of an encoder–decoder's source.
        rounded: whether the model's products round what they multiply (int8), which the parts do not.
    """

    what: str
    position: int
    at: str
    shares: tuple[Share, ...]
    value: float
    capped: float | None
    held: tuple[str, ...]
    neurons: Mapping[str, Tensor]
    sources: Mapping[str, Tensor]
    pieces: tuple[str, ...]
    source_pieces: tuple[str, ...] = ()
    rounded: bool = False

    @property
    def total(self) -> float:
        """What the parts add up to."""
        return sum(share.value for share in self.shares)

    @property
    def gap(self) -> float:
        """How far that is from the model's own number: rounding, and nothing else."""
        return self.total - self.value

    def __getitem__(self, name: str) -> float:
        """What the part of this name adds; what all within it add, where it is a layer or a branch."""
        found = [s.value for s in self.shares if s.name == name or s.name.startswith(f"{name}.")]
        if not found:
            raise KeyError(name)
        return sum(found)

    def top(self, n: int = 10) -> list[Share]:
        """The parts that add or take away the most, the largest first."""
        return sorted(self.shares, key=lambda share: -abs(share.value))[: whole("n", n, 0)]

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            "what": self.what,
            "position": self.position,
            "at": self.at,
            "value": self.value,
            "capped": self.capped,
            "total": self.total,
            "gap": self.gap,
            "held": list(self.held),
            "parts": [{"name": s.name, "kind": s.kind, "layer": s.layer, "value": s.value} for s in self.shares],
            "neurons": {name: values.tolist() for name, values in self.neurons.items()},
            "sources": {name: values.tolist() for name, values in self.sources.items()},
            "pieces": list(self.pieces),
            "source_pieces": list(self.source_pieces),
            "notes": self._notes(),
        }

    def figure(self) -> Figure:
        """The largest parts, all of them by layer, and what was asked for in detail."""
        best = self.top(SHOWN)
        parts: list[Part] = [
            Bars(f"the {len(best)} largest parts", [s.name for s in best], [s.value for s in best], scale="signed")
        ]
        if any(share.layer is not None for share in self.shares):
            parts.append(self._by_layer())
        for name, values in self.neurons.items():
            flat = values.flatten()
            most = flat.abs().topk(min(SHOWN, len(flat))).indices.tolist()
            wide = values.shape[-1]
            words = [f"expert {i // wide}, {i % wide}" if values.dim() > 1 else str(i) for i in most]
            shown = [float(flat[i]) for i in most]
            parts.append(Bars(f"{name}: the {len(most)} largest of {len(flat)} neurons", words, shown, scale="signed"))
        for name, table in self.sources.items():
            keys = self.source_pieces if ".cross" in name else self.pieces
            heads = [f"head {i}" for i in range(len(table))]
            title = f"{name}: what each head adds from each position"
            parts.append(Grid(title, heads, keys[: table.shape[1]], table.tolist(), scale="signed", across="position"))
        return Figure(f"{self.what}, position {self.position}", parts, self._notes())

    def _by_layer(self) -> Grid:
        cells: dict[tuple[int, str], float] = {}
        columns: dict[str, None] = {}
        for share in self.shares:
            if share.layer is not None:
                word = share.name.split(f"layers.{share.layer}.", 1)[1]
                word = word.replace(".heads.", " ").replace(".experts.", " ")
                columns.setdefault(word)
                cells[share.layer, word] = share.value
        layers = sorted({layer for layer, _ in cells})
        # Biases last, so that heads stand beside one another in every layer.
        words = sorted(columns, key=lambda word: (word.endswith("bias"), _natural(word)))
        values = [[cells.get((layer, word)) for word in words] for layer in layers]
        labels = [f"layer {layer}" for layer in layers]
        return Grid("every part by layer", labels, words, values, scale="signed", across="part", down="layer")

    def _notes(self) -> list[str]:
        notes = [
            f"The parts add up to {self.total:.6g}; the model's own number is {self.value:.6g}.",
            "What an earlier part does by way of later ones is counted as the later ones'.",
        ]
        if self.rounded:
            notes.append(
                f"The gap of {self.gap:.2g} is rounding: this model's products are of whole numbers (int8), the parts' "
                "are not."
            )
        if self.held:
            some = ", ".join(self.held[:3]) + (f" and {len(self.held) - 3} more" if len(self.held) > 3 else "")
            notes.append(f"Scales of norms are held as they are here, though every part has a hand in them: {some}.")
        if self.capped is not None:
            notes.append(f"This is the logit before its cap; after it, it is {self.capped:.6g}.")
        if self.sources:
            notes.append("Attention weights are a factor of this, and are not an explanation by themselves.")
        return notes


def _natural(word: str) -> tuple[str, Sequence[int]]:
    name, _, number = word.rpartition(" ")
    return (name, [int(number)]) if number.isdigit() else (word, [])
