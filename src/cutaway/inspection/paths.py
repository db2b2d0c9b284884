"""Path patching: what one part tells another directly, everything between them held as it was.

Wang et al. 2022, https://arxiv.org/abs/2211.00593; Goldowsky-Dill et al. 2023, https://arxiv.org/abs/2304.05969.

::

    1  both texts are run, and what every head and feed-forward network makes of them is kept
    2  the base text again: the sender gives what it gave for the other text, all others give what they gave for the
       base text, whatever they read by now. So the stream differs by what the sender wrote, and by nothing else.
       What the receivers make of it is kept
    3  the base text once more, where the receivers read that and everything goes on from there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.generation.checks import whole
from cutaway.inspection.change import Edit
from cutaway.inspection.figure import Bars, Figure, Grid, Part
from cutaway.inspection.listed import listed
from cutaway.inspection.metrics import Metric, words_of
from cutaway.inspection.patching import Direction
from cutaway.inspection.readout import Spell, numbers
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.sites import (
    HEADS,
    Asked,
    Site,
    Texts,
    answers_at,
    check_at,
    check_texts,
    first_layer,
    put,
    stream_of,
)
from cutaway.inspection.steps import Progress, counted
from cutaway.inspection.where import is_place
from cutaway.models import Transformer
from cutaway.spec import AttentionSpec
from cutaway.spec.names import axis_sizes, tap_names

END = "end"
READS = ("q", "k", "v")


@dataclass(frozen=True, slots=True, repr=False)
class Paths(Shown):
    """What a metric became when each sender alone told the receivers what it would have told them of the other text.

    Attributes:
        layers: the branches that send. values: the metric, a mean over the pairs; of a feed-forward network there is
            one column, and NaN stands where a sender comes after every receiver. [layer, sender]
        receivers: who was told. clean, corrupt, metric, direction: as of a sweep.
    """

    layers: tuple[str, ...]
    values: Tensor
    receivers: tuple[str, ...]
    clean: float
    corrupt: float
    metric: str
    direction: Direction

    @property
    def effect(self) -> Tensor:
        """The change of the metric, as a share of what lies between the two runs; 0 is none. [layer, sender]"""
        start, other = (self.corrupt, self.clean) if self.direction == "denoise" else (self.clean, self.corrupt)
        return (self.values - start) / (other - start) if other != start else torch.full_like(self.values, float("nan"))

    def top(self, n: int = 10) -> list[tuple[str, int, float]]:
        """The senders that matter most, either way: (branch, head, effect)."""
        flat, width = self.effect.flatten(), self.values.shape[1]
        best = flat.abs().nan_to_num(nan=-1.0).topk(min(whole("n", n, 0), len(flat))).indices.tolist()
        return [(self.layers[i // width], i % width, float(flat[i])) for i in best if flat[i] == flat[i]]

    def figure(self) -> Figure:
        """A grid of heads, and bars of feed-forward networks."""
        heads = [i for i, name in enumerate(self.layers) if name.endswith((".attn", ".cross"))]
        others = [i for i in range(len(self.layers)) if i not in heads]
        effect, parts = self.effect, list[Part]()
        if heads:
            columns = [str(i) for i in range(self.values.shape[1])]
            rows = [self.layers[i] for i in heads]
            parts.append(Grid("Heads", rows, columns, numbers(effect[heads]), None, "signed", "head", "layer"))
        told = [i for i in others if effect[i, 0] == effect[i, 0]]
        if told:
            values = [float(effect[i, 0]) for i in told]
            parts.append(Bars("Feed-forward networks", [self.layers[i] for i in told], values, "effect", "signed"))
        note = (
            "An effect is a share of the metric's change from one run to the other, by this path alone: all heads and "
        )
        title = f"Direct paths to {', '.join(self.receivers)}"
        return Figure(title, parts, (f"{note}feed-forward networks between give what they gave before.",))

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        head = {"layers": [*self.layers], "receivers": [*self.receivers], "metric": self.metric}
        values = {"values": numbers(self.values), "effect": numbers(self.effect)}
        return {**head, **values, "clean": self.clean, "corrupt": self.corrupt, "direction": self.direction}


@dataclass(frozen=True, slots=True)
class Receiver:
    """Who is told: a head's ``q``, ``k`` or ``v``, what a feed-forward network reads, or the end of the stream.

    Attributes:
        name: ``decoder.layers.9.attn.q``, ``decoder.layers.4.mlp.in``, or ``"end"``.
        head: which head, or key/value head of ``k`` and ``v``; None for all.
        position: only there; None for everywhere.
    """

    name: str
    head: int | None = None
    position: int | None = None

    def label(self) -> str:
        """As it is written in a title."""
        return self.name + ("" if self.head is None else f"[{self.head}]")


@torch.no_grad()
def path_sweep(
    model: Transformer,
    clean: Texts,
    corrupt: Texts,
    metric: Metric,
    receivers: Sequence[str | Receiver] = (END,),
    *,
    direction: Direction = "noise",
    position: int | None = None,
    answer_at: int | None = None,
    sources: Texts | None = None,
    batch: int = 32,
    progress: Progress | bool | None = None,
    spell: Spell | None = None,
) -> Paths:
    """The direct effect of every head and feed-forward network on some receivers.

    Args:
        model: one whose stack ends at a head that scores.
        clean, corrupt, metric, answer_at, batch, progress, spell: see :func:`patch_sweep`.
        receivers: told together, of the stack that ends at the head: the ``"end"``, names, or :class:`Receiver` s.
        direction: ``"noise"``: senders tell of the corrupt text in the clean run; ``"denoise"``: the other way round.
        position: where senders send from; everywhere by default.
        sources: of an encoder–decoder, what its encoder reads in both runs.

    Raises:
        NameNotFound: a receiver that is none.
        RequestError: texts that are no pairs, or no such head.
    """
    batch = whole("batch", batch, 1)
    if direction not in ("denoise", "noise"):
        raise RequestError("no such direction", field="direction", expected="denoise or noise", got=direction)
    texts = [check_texts(model, name, rows) for name, rows in (("clean", clean), ("corrupt", corrupt))]
    if [len(row) for row in texts[0]] != [len(row) for row in texts[1]]:
        sizes = [[len(row) for row in rows] for rows in texts]
        raise RequestError("texts are no pairs of one length", field="corrupt", expected=sizes[0], got=sizes[1])
    place = check_at(model, answer_at, len(texts[0][0]))
    if position is not None:
        check_at(model, position, len(texts[0][0]), "position")
    read = None if sources is None else check_texts(model, "sources", sources, of_source=True)
    runs = [Asked(model, rows, metric, place, read) for rows in texts]
    gives = _gives(model)
    streams = [*dict.fromkeys(map(stream_of, gives.values()))]
    seen = [run.run([*gives.values(), *streams, answers_at(model)]) for run in runs]
    told = [run.told(one).mean().item() for run, one in zip(runs, seen, strict=True)]
    base, other = (0, 1) if direction == "noise" else (1, 0)
    told_to = _receivers(model, receivers)
    for receiver in told_to:
        if receiver.position is not None:
            check_at(model, receiver.position, len(texts[0][0]), receiver.name)

    axes, last = tap_names(model.spec), max(_order(model, receiver.name) for receiver in told_to)
    widths = {at: axis_sizes(model.spec, name)["head"] if name.endswith(".z") else 1 for at, name in gives.items()}
    senders = [
        Site(name, position, head if name.endswith(".z") else None)
        for at, name in gives.items()
        for head in range(widths[at])
        if _order(model, name) < last
    ]
    between = [name for name in gives.values() if _order(model, name) < last]
    one = _Sender(runs[base], between, {k: seen[base][k] for k in streams}, seen[base], seen[other], told_to, axes)
    values = torch.full((len(gives), max(widths.values(), default=1)), float("nan"), dtype=torch.float64)
    step = max(1, batch // len(texts[0]))
    with counted(progress, len(senders), "senders") as report:
        for i in range(0, len(senders), step):
            some = senders[i : i + step]
            for site, value in zip(some, one.told(some).mean(1).tolist(), strict=True):
                values[[*gives.values()].index(site.name), site.head or 0] = value
            report(i + len(some), len(senders))
    said = words_of(metric, spell)
    return Paths(tuple(gives), values, tuple(r.label() for r in told_to), told[0], told[1], said, direction)


@dataclass(frozen=True, slots=True)
class _Sender:
    """Steps 2 and 3, for several senders at a time.

    Attributes:
        base: the run that is changed.
        between: what every branch before the last receiver gives, by name.
        streams: what each layer gets in that run.
        own: what everything gives in it. others: what it gives in the other run.
        receivers: who is told. axes: of every quantity.
    """

    base: Asked
    between: Sequence[str]
    streams: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    receivers: Sequence[Receiver]
    axes: Mapping[str, Sequence[str]]

    def told(self, senders: Sequence[Site]) -> Tensor:
        """The metric for each sender. [sender, pair]"""
        n, pairs = len(senders), len(self.base.rows)
        begin = first_layer([site.name for site in senders], self.streams)
        edits: dict[str, Edit] = {}
        for name in self.between[self._from(senders) :]:
            rows = [(i * pairs, site) for i, site in enumerate(senders) if site.name == name]
            edits[name] = _held(self.own[name], rows, self.axes[name], self.others[name], pairs)
        if self.receivers[0].name == END:
            return self.base.answer(edits, n, begin)
        names = [*dict.fromkeys(receiver.name for receiver in self.receivers)]
        heard = self.base.run(names, edits, n, begin)
        # The receivers read that, in a run where nothing else is held.
        into = {
            name: put(
                [(0, Site(name, r.position, r.head)) for r in self.receivers if r.name == name],
                self.axes[name],
                heard[name],
                n * pairs,
            )
            for name in names
        }
        return self.base.answer(into, n, first_layer(names, self.streams))

    def _from(self, senders: Sequence[Site]) -> int:
        """The first branch of the first sender's layer: what is before it gives what it gave anyway."""
        layers = [stream_of(name) for name in self.between]
        return min(layers.index(stream_of(site.name)) for site in senders)


def _held(value: Tensor, rows: list[tuple[int, Site]], axes: Sequence[str], other: Tensor, pairs: int) -> Edit:
    """What a branch gave before, in every row, but for the senders' own."""
    send = put(rows, axes, other, pairs)

    def edit(now: Tensor) -> Tensor:
        return send(value.repeat(len(now) // pairs, *[1] * (value.dim() - 1)))

    return edit


def _gives(model: Transformer) -> dict[str, str]:
    """Each branch of the stack that ends at the head → what it gives: all heads apart, or what is added."""
    stack = model.spec.main
    return {
        (at := f"{stack}.layers.{i}.{b.name}"): f"{at}.{'z' if isinstance(b.body, AttentionSpec) else 'out'}"
        for i, layer in enumerate(model.spec.stacks[stack].layers)
        for b in layer.branches
    }


def _order(model: Transformer, name: str) -> int:
    """Where in the computation a branch comes: the branches of a parallel layer at the same time."""
    if name == END:
        return 1 << 30
    _, _, layer, branch, *_ = name.split(".")
    block = model.spec.stacks[model.spec.main].layers[int(layer)]
    places = [b.name for b in block.branches]
    return 100 * int(layer) + (0 if block.parallel else places.index(branch))


def _receivers(model: Transformer, given: Sequence[str | Receiver]) -> list[Receiver]:
    """Those who are told, if there are such."""
    receivers = [Receiver(one) if isinstance(one, str) else one for one in listed("receivers", given, "receivers")]
    if not receivers:
        raise RequestError("nobody is told", field="receivers", expected="at least one")
    for place, one in enumerate(receivers):
        if not isinstance(one, Receiver):
            wanted = f"{END}, a name, or a Receiver"
            raise RequestError("not a receiver", field=f"receivers/{place}", expected=wanted, got=one)
    known = tap_names(model.spec)
    for receiver in receivers:
        if receiver.name == END:
            if len(receivers) > 1 or receiver != Receiver(END):
                hint = "What others make of it goes there too: sweep twice."
                raise RequestError("the end is told alone, and everywhere", field="receivers", hint=hint)
            continue
        parts = receiver.name.split(".")
        fits = len(parts) == 5 and parts[0] == model.spec.main and parts[4] in (*READS, "in")
        if not fits or receiver.name not in known or (parts[3] == "cross" and parts[4] != "q"):
            hint = f"A name is such as {model.spec.main}.layers.1.attn.q, {model.spec.main}.layers.1.mlp.in, or {END}."
            raise NameNotFound("nobody of this name reads the stream", field=receiver.name, hint=hint)
        words = [word for word in known[receiver.name] if word in HEADS]
        most = axis_sizes(model.spec, receiver.name)[words[0]] if words else 0
        if receiver.head is not None and not (is_place(receiver.head) and receiver.head < most):
            wanted = f"0…{most - 1}" if most else "None"
            raise RequestError("no such head", field=receiver.name, expected=wanted, got=receiver.head)
    return receivers
