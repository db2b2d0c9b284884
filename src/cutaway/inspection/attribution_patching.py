"""Activation patching by its slope: every place of every quantity at once, as a first guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection.figure import Figure, Grid, Part
from cutaway.inspection.listed import names_listed
from cutaway.inspection.probe import Measure, Question, derived
from cutaway.inspection.reading import named, text_of
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.slopes import check_slopes
from cutaway.inspection.target import Of
from cutaway.models import Transformer
from cutaway.spec.names import match, tap_names

SUMMED = ("d_model", "d_head", "1")  # axes of a vector: what is patched is patched as a whole


@dataclass(frozen=True, slots=True, repr=False)
class PatchEstimates(Shown):
    """What putting each quantity of a clean run into a corrupt one would change, to first order.

    Attributes:
        what: the number in words.
        clean, corrupt: the number in either run.
        estimates: name → the change, summed over vectors: [query], [query, head], [head, query, key] …
        axes: name → the words for those axes.
        pieces: a text for each position of the corrupt run; ``source_pieces`` of an encoder–decoder's source.
    """

    what: str
    clean: float
    corrupt: float
    estimates: Mapping[str, Tensor]
    axes: Mapping[str, tuple[str, ...]]
    pieces: tuple[str, ...]
    source_pieces: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Tensor:
        return self.estimates[name]

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            "what": self.what,
            "clean": self.clean,
            "corrupt": self.corrupt,
            "pieces": list(self.pieces),
            "source_pieces": list(self.source_pieces),
            "axes": {name: list(axes) for name, axes in self.axes.items()},
            "estimates": {name: values.tolist() for name, values in self.estimates.items()},
        }

    def figure(self) -> Figure:
        """Layers by position, where a quantity has one; layers by head, expert or neuron, where it has those."""
        alike: dict[tuple[str, tuple[str, ...]], dict[str, Tensor]] = {}
        for name, values in self.estimates.items():
            layer, kind = _layer_and_kind(name)
            alike.setdefault((kind, self.axes[name]), {})[layer] = values
        parts: list[Part] = []
        for (kind, axes), rows in alike.items():
            for word in axes:
                if word in ("query", "source", "head", "kv_head", "expert"):
                    others = [i for i, axis in enumerate(axes) if axis != word]
                    table = [(values.sum(others) if others else values).tolist() for values in rows.values()]
                    columns = self._columns(word, len(table[0]))
                    across = "position" if word in ("query", "source") else word
                    parts.append(Grid(f"{kind} by {across}", [*rows], columns, table, scale="signed", across=across))
        notes = (
            f"In the clean run it is {self.clean:.4g}, in the corrupt one {self.corrupt:.4g}; each cell guesses how "
            "far the clean value there would move the corrupt run.",
            "These are slopes times differences, not the model's own numbers: where they are large, patch and see.",
        )
        return Figure(f"attribution patching: {self.what}", parts, notes)

    def _columns(self, word: str, n: int) -> list[str]:
        if word in ("query", "source"):
            pieces = self.source_pieces if word == "source" else self.pieces
            return [*pieces] if len(pieces) == n else [str(i) for i in range(n)]
        return [f"{word} {i}" for i in range(n)]


def attribution_patching(
    model: Transformer,
    clean: Sequence[int],
    corrupt: Sequence[int],
    of: Of | Measure,
    names: Sequence[str],
    *,
    position: int | None = None,
    source: Sequence[int] | None = None,
    corrupt_source: Sequence[int] | None = None,
    types: Sequence[int] | None = None,
    pieces: Sequence[str] | None = None,
    source_pieces: Sequence[str] | None = None,
) -> PatchEstimates:
    """Gradient in the corrupt run × (clean − corrupt), for any quantities (Nanda 2023; Syed et al. 2023).

    Two passes and one backwards, however many places there are. What comes of actually patching one of them is what
    ``inspection.patching`` measures.

    Args:
        model: in evaluation mode. Weights in the form that a file stores them in will do.
        clean, corrupt: ids of two texts of one length; of an encoder–decoder, the decoder's.
        of: as for :func:`saliency`; what is measured in the corrupt run.
        names: names or patterns of quantities (``decoder.layers.*.attn.z``).
        position: where the target is, in both.
        source, corrupt_source: of an encoder–decoder, what its encoder reads in either run.
        types: each token's type, where the model has types, in both.
        pieces, source_pieces: a text for each position of the corrupt run, for labels.

    Raises:
        RequestError: texts of different lengths, or a target that this model does not have.
        NameNotFound: a pattern matches nothing; the hint has the nearest names.
    """
    axes = tap_names(model.spec)
    wanted = match([names] if isinstance(names, str) else names_listed("names", names), axes)
    if not wanted:
        raise RequestError("no quantity was named", field="names", expected="at least one")
    check_slopes(model, "model")
    texts = (
        text_of(model, clean, source, types, "clean"),
        text_of(model, corrupt, source if corrupt_source is None else corrupt_source, types, "corrupt"),
    )
    lengths = {"corrupt": [len(t.ids) for t in texts], "corrupt_source": [len(t.source or ()) for t in texts]}
    for word, (a, b) in lengths.items():
        if a != b:
            what = "only texts of equal length have the same places"
            raise RequestError(what, field=word, expected=f"{a} tokens", got=b)
    before: dict[str, Tensor] = {}
    asked = Question(model, texts[0], of, position)
    with torch.no_grad():
        first = asked.ask({}, {name: _keeper(before, name, False) for name in wanted})
    after: dict[str, Tensor] = {}
    question = Question(model, texts[1], of, position)
    with torch.enable_grad():
        second = question.ask({}, {name: _keeper(after, name, True) for name in wanted})
        slopes = derived(second.sum(), [after[name] for name in wanted])
    estimates, words = {}, {}
    for name, slope in zip(wanted, slopes, strict=True):
        here, there = before[name].cpu().double(), after[name].detach().cpu().double()
        gone = torch.where(here == there, 0.0, (here - there) * slope.cpu().double())[0]  # of two −inf scores, nothing
        kept = [i for i, word in enumerate(axes[name][1:]) if word not in SUMMED]
        rest = [i for i in range(gone.dim()) if i not in kept]
        estimates[name] = (gone.sum(rest) if rest else gone).float().cpu()
        words[name] = tuple(axes[name][1:][i] for i in kept)
    return PatchEstimates(
        what=question.what,
        clean=float(first),
        corrupt=float(second.detach()),
        estimates=estimates,
        axes=words,
        pieces=named(pieces, texts[1].ids, "pieces"),
        source_pieces=named(source_pieces, texts[1].source or (), "source_pieces"),
    )


def _keeper(kept: dict[str, Tensor], name: str, slope: bool) -> Measure:
    """What keeps a quantity; so that it has a slope, even where nothing before it has one."""

    def keep(value: Tensor) -> Tensor:
        if slope and not value.requires_grad:
            value = value.detach().requires_grad_()
        kept[name] = value
        return value

    return keep


def _layer_and_kind(name: str) -> tuple[str, str]:
    """
    >>> _layer_and_kind("decoder.layers.3.attn.z"), _layer_and_kind("embed.out")
    (('layer 3', 'decoder attn.z'), ('', 'embed.out'))
    """
    parts = name.split(".")
    if len(parts) > 3 and parts[1] == "layers":
        return f"layer {parts[2]}", f"{parts[0]} {'.'.join(parts[3:])}"
    return "", name
