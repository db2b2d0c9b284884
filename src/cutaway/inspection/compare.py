"""Two models, or two texts, side by side: the first quantity that differs, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids, number
from cutaway.inspection.figure import Bars, Figure, Part, Rows, Words
from cutaway.inspection.listed import names_listed
from cutaway.inspection.readout import blocks, labels, scored
from cutaway.inspection.running import trace
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.steps import Progress, counted
from cutaway.models import Transformer
from cutaway.spec import HeadSpec
from cutaway.spec.names import axis_sizes, match, tap_names

Align: TypeAlias = Literal["start", "end"]

LARGEST = 1 << 25  # numbers of each side that are kept at once
APART = ("head_out", "experts")  # by far the largest, and told by what they add up to


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity on both sides.

    Attributes:
        name: of the quantity.
        most: the largest difference. Infinite where only one side is a number.
        relative: the same over the left's largest number.
        cosine: of the two as vectors; 1 where both are zero.
        where: the place of the largest difference, an index for each axis.
        axes: words for them.
    """

    name: str
    most: float
    relative: float
    cosine: float
    where: tuple[int, ...]
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """What differs between two runs, in the order of the computation.

    Attributes:
        differences: of every quantity that both have in the same form.
        tolerance: a relative difference beyond this counts.
        only_left, only_right: quantities that one of them lacks.
        other_shape: quantities that both have, of sizes that differ.
        pieces: a text for each position that was compared.
        divergence: KL from the left's final distribution to the right's, in nats, for each position; empty where there
            are no scores of one vocabulary. agree: whether both would say the same token there.
        notes: what has to be said of it.
    """

    differences: tuple[Difference, ...]
    tolerance: float
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    other_shape: tuple[str, ...]
    pieces: tuple[str, ...]
    divergence: tuple[float, ...]
    agree: tuple[bool, ...]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Difference | None:
        """The first quantity that differs by more than the tolerance; None where none does."""
        return next((d for d in self.differences if d.relative > self.tolerance), None)

    @property
    def layers(self) -> dict[str, Difference]:
        """The largest relative difference of each layer, and of what is outside of layers, in order."""
        found: dict[str, Difference] = {}
        for d in self.differences:
            parts = d.name.split(".")
            at = ".".join(parts[:3]) if len(parts) > 2 and parts[1] == "layers" else parts[0]
            at = ".".join(parts[:2]) if len(parts) == 3 and parts[1] == "norm" else at
            if at not in found or d.relative > found[at].relative:
                found[at] = d
        return found

    def figure(self) -> Figure:
        """The first difference, the worst of each layer, and where the answers part."""
        first = self.first
        parts: list[Part] = []
        columns = ["quantity", "largest", "relative", "cosine", "at"]
        if first is not None:
            after = [d for d in self.differences if d.relative > self.tolerance][:8]
            parts.append(Rows("The first that differ", columns, [_row(d) for d in after]))
        worst = self.layers
        parts.append(Bars("Largest relative difference", [*worst], [d.relative for d in worst.values()], "relative"))
        if self.divergence:
            parts.append(Words("Nats between the answers", self.pieces, self.divergence, "nats", "plain"))
        missing = [["left only", n] for n in self.only_left] + [["right only", n] for n in self.only_right]
        missing += [["of other sizes", n] for n in self.other_shape]
        if missing:
            parts.append(Rows("Not compared", ["side", "quantity"], missing))
        said = "Nothing differs by more than the tolerance" if first is None else f"First to differ: {first.name}"
        return Figure(said, parts, self.notes)

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        each = [_plain(d) for d in self.differences]
        first = None if self.first is None else _plain(self.first)
        layers = {name: _plain(d) for name, d in self.layers.items()}
        missing = {"only_left": [*self.only_left], "only_right": [*self.only_right]}
        ends = {"pieces": [*self.pieces], "divergence": [*self.divergence], "agree": [*self.agree]}
        head = {"first": first, "tolerance": self.tolerance, "layers": layers, "differences": each}
        return {**head, **missing, "other_shape": [*self.other_shape], **ends, "notes": [*self.notes]}


def _row(d: Difference) -> list[str | float]:
    where = ", ".join(f"{word} {i}" for word, i in zip(d.axes, d.where, strict=True) if word not in ("batch", "1"))
    return [d.name, d.most, d.relative, d.cosine, where]


def _plain(d: Difference) -> dict[str, Any]:
    place = dict(zip(d.axes, d.where, strict=True))
    return {"name": d.name, "most": d.most, "relative": d.relative, "cosine": d.cosine, "where": place}


@torch.no_grad()
def compare(
    left: Transformer,
    right: Transformer,
    ids: Sequence[int],
    other: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    *,
    tolerance: float = 1e-3,
    align: Align = "start",
    source: Sequence[int] | None = None,
    other_source: Sequence[int] | None = None,
    pieces: Sequence[str] | None = None,
    progress: Progress | bool | None = None,
) -> Comparison:
    """Run two models, or one on two texts, and walk what they compute in order.

    Args:
        left, right: the models; the same one twice to compare texts.
        ids: the text. other: the right's, where it is another.
        names: names or patterns; by default all but what is there for each head and expert apart.
        tolerance: a largest difference counts as one beyond this share of the left's largest number.
        align: of texts of different lengths, as many positions are compared as both have, from the ``"start"`` or to
            the ``"end"``.
        source, other_source: of encoder–decoders, what the encoders read.
        pieces: a text for each token of ``ids``.
        progress: called with how many quantities are done and how many there are; True for a line.

    Raises:
        NameNotFound: a pattern matches nothing on either side.
        RequestError: tokens that a model does not have.
    """
    tolerance = number("tolerance", tolerance, 0.0)
    if align not in ("start", "end"):
        raise RequestError("no such way to align", field="align", expected="start or end", got=align)
    texts = _texts(ids, other, left, right)
    sources = (source, other_source if other_source is not None else source)
    both, only = _shared(left, right, names)
    if not both:
        what = "these models have no quantity in common"
        raise RequestError(what, field="other", got=right.spec.family, expected=left.spec.family)
    sides = [(left, texts[0], sources[0]), (right, texts[1], sources[1])]
    shorter = {"query": min(map(len, texts)), "key": min(map(len, texts))}
    if source is not None and sources[1] is not None:
        shorter |= {word: min(len(source), len(sources[1])) for word in ("source", "source_key")}
    found, odd = [], []
    axes = tap_names(left.spec)
    with counted(progress, len(both), "quantities") as report:
        for group in _groups(left, both, len(texts[0]), len(source or ())):
            one, two = (_seen(model, text, group, read) for model, text, read in sides)
            for name in group:
                a, b = (_aligned(side[name], axes[name], shorter, align) for side in (one, two))
                if a.shape != b.shape:
                    odd.append(name)
                else:
                    found.append(_difference(name, a, b, axes[name]))
                report(len(found) + len(odd), len(both))
    n = shorter["query"]
    span = slice(0, n) if align == "start" else slice(len(texts[0]) - n, len(texts[0]))
    divergence, agree = _ends(sides, n, align)
    notes = ["Both sides are computed by the readable blocks; sums in another order differ by about 1e-6 of a number."]
    if texts[0] != texts[1]:
        notes.append(f"Texts differ: {n} positions are compared, from the {align}.")
    return Comparison(
        differences=tuple(found),
        tolerance=tolerance,
        only_left=tuple(only[0]),
        only_right=tuple(only[1]),
        other_shape=tuple(odd),
        pieces=tuple(labels(texts[0], pieces)[span]),
        divergence=divergence,
        agree=agree,
        notes=tuple(notes),
    )


def _texts(
    ids: Sequence[int], other: Sequence[int] | None, left: Transformer, right: Transformer
) -> tuple[list[int], list[int]]:
    first = check_ids(ids, left.spec.vocab_size, "ids")
    return first, check_ids(first if other is None else other, right.spec.vocab_size, "other")


def _shared(
    left: Transformer, right: Transformer, names: Sequence[str] | None
) -> tuple[list[str], tuple[list[str], list[str]]]:
    """Names that both have with the same axes, in the left's order, and what only one has."""
    a, b = tap_names(left.spec), tap_names(right.spec)
    usual = [name for name in a | b if name.rsplit(".", 1)[-1] not in APART]
    wanted = usual if names is None else match(names_listed("names", names), a | b)
    both = [name for name in wanted if a.get(name) == b.get(name)]
    return both, ([n for n in wanted if n in a and n not in both], [n for n in wanted if n in b and n not in both])


def _groups(model: Transformer, names: Sequence[str], query: int, source: int) -> Iterator[list[str]]:
    """Names to be recorded together, so that each group stays within ``LARGEST`` where one name does."""
    axes = tap_names(model.spec)
    group: list[str] = []
    size = 0
    for name in names:
        known = {"batch": 1, "query": query, "key": query, "source": source, "source_key": source}
        known |= axis_sizes(model.spec, name)
        n = 1
        for word in axes[name]:
            n *= known.get(word, 1)
        if group and size + n > LARGEST:
            yield group
            group, size = [], 0
        group.append(name)
        size += n
    if group:
        yield group


def _seen(
    model: Transformer, ids: list[int], names: Sequence[str], source: Sequence[int] | None
) -> Mapping[str, Tensor]:
    return trace(model, [ids], tuple(names), sources=None if source is None else [list(source)], stop=True)


def _aligned(x: Tensor, axes: tuple[str, ...], shorter: Mapping[str, int], align: Align) -> Tensor:
    for i, word in enumerate(axes):
        if word in shorter:
            n = min(shorter[word], x.shape[i])
            x = x.narrow(i, 0 if align == "start" else x.shape[i] - n, n)
    return x.detach().cpu()


def _difference(name: str, a: Tensor, b: Tensor, axes: tuple[str, ...]) -> Difference:
    """Equal infinities are equal; a number beside none is as far from it as can be."""
    a, b = a.double(), b.double()
    if not a.numel():
        return Difference(name, 0.0, 0.0, 1.0, (0,) * a.dim(), axes)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    where = int(apart.argmax())
    both = a.isfinite() & b.isfinite()
    x, y = a[both], b[both]
    most, largest = float(apart.flatten()[where]), float(x.abs().max()) if len(x) else 0.0
    relative = 0.0 if most == 0 else most / largest if largest else float("inf")
    lengths = float(x.norm()) * float(y.norm())
    cosine = float(x @ y) / lengths if lengths else float(x.norm() == y.norm())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(where), apart.shape))
    return Difference(name, most, relative, cosine, place, axes)


def _ends(
    sides: Sequence[tuple[Transformer, list[int], Sequence[int] | None]], n: int, align: Align
) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """The final distributions, where both are of one vocabulary."""
    models = [model for model, _, _ in sides]
    if not all(isinstance(model.spec.head, HeadSpec) for model in models):
        return (), ()
    if models[0].spec.vocab_size != models[1].spec.vocab_size:
        return (), ()
    last = []
    for model, text, source in sides:
        hidden = _seen(model, text, [f"{model.spec.main}.norm.out"], source)[f"{model.spec.main}.norm.out"][0]
        last.append(hidden[:n] if align == "start" else hidden[len(hidden) - n :])
    nats: list[float] = []
    agree: list[bool] = []
    for block in blocks(n, models[0].spec.vocab_size):
        a, b = (scored(model, h[block]).log_softmax(-1) for model, h in zip(models, last, strict=True))
        nats += (a.exp() * (a - b)).sum(-1).tolist()
        agree += (a.argmax(-1) == b.argmax(-1)).tolist()
    return tuple(nats), tuple(agree)
