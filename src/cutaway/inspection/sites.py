"""Many small changes to one run, each in rows of its own, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids
from cutaway.inspection.change import Edit
from cutaway.inspection.listed import listed
from cutaway.inspection.metrics import Metric, measured
from cutaway.inspection.readout import scored
from cutaway.inspection.running import trace
from cutaway.inspection.steps import Progress, counted
from cutaway.inspection.where import counted_along
from cutaway.models import Transformer
from cutaway.spec import HeadSpec
from cutaway.spec.names import tap_names

HEADS = ("head", "kv_head", "expert")

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Site:
    """A part of a named quantity.

    Attributes:
        name: of the quantity.
        position: of the text, or of the source where that alone is counted; None for all.
        head: or key/value head, or expert; None for all.
    """

    name: str
    position: int | Sequence[int] | None = None
    head: int | None = None

    def index(self, axes: Sequence[str], rows: slice) -> tuple[int | slice | list[int], ...]:
        """Where it is in some rows of a tensor with these axes."""
        found: list[int | slice | list[int]] = [slice(None)] * len(axes)
        found[0] = rows
        along = counted_along(axes)
        for i, word in enumerate(axes):
            if word == along and self.position is not None:
                found[i] = self.position if isinstance(self.position, int) else list(self.position)
            if word in HEADS and self.head is not None:
                found[i] = self.head
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Asked:
    """Texts, and what is asked of the answer.

    Attributes:
        model: what is run.
        rows: one text for each pair, of equal length. sources: of an encoder–decoder.
        metric: what is asked. at: the position whose scores are looked at.
    """

    model: Transformer
    rows: Texts
    metric: Metric
    at: int
    sources: Texts | None = None

    def run(
        self,
        names: Sequence[str],
        edits: Mapping[str, Edit] | None = None,
        times: int = 1,
        start: tuple[str, Tensor] | None = None,
    ) -> Mapping[str, Tensor]:
        """One pass over all texts, ``times`` after one another, with edits, as far as the last of ``names``.

        ``start`` is where it may begin: a layer's ``resid_in``, and what stands there for each text.
        """
        sources = None if self.sources is None else [list(row) for row in self.sources] * times
        begin = None if start is None else (start[0], start[1].repeat(times, 1, 1))
        rows = [list(row) for row in self.rows] * times
        return trace(self.model, rows, tuple(names), edits, sources=sources, start=begin, stop=True)

    def answer(
        self, edits: Mapping[str, Edit] | None = None, times: int = 1, start: tuple[str, Tensor] | None = None
    ) -> Tensor:
        """The metric of each. [times, pair]"""
        return self.told(self.run([answers_at(self.model)], edits, times, start), times)

    def told(self, seen: Mapping[str, Tensor], times: int = 1) -> Tensor:
        """The metric of what a run came to. [times, pair]"""
        last = seen[answers_at(self.model)]
        last = last if last.dim() == 2 else last[:, self.at]  # one answer a text, or one a token
        scores = scored(self.model, last) if isinstance(self.model.spec.head, HeadSpec) else last
        return measured(self.metric, scores.unflatten(0, (times, -1)))


def answers_at(model: Transformer) -> str:
    """What has to be recorded to know the answer: scores of all tokens at all positions would be large.

    Raises:
        RequestError: the model scores nothing.
    """
    if isinstance(model.spec.head, HeadSpec):
        return f"{model.spec.main}.norm.out"
    if "logits" not in tap_names(model.spec):
        raise RequestError("this model scores nothing", field="head")
    return "logits"


def swept(
    asked: Asked,
    sites: Sequence[Site],
    given: Mapping[str, Tensor],
    streams: Mapping[str, Tensor],
    *,
    batch: int,
    progress: Progress | bool | None = None,
    what: str = "runs",
) -> Tensor:
    """Run once for each site, with what stands there replaced. [site, pair]

    Args:
        asked: what is run.
        sites: one a run.
        given: name of a quantity → what is put there, a row for each pair.
        streams: name of a layer's ``resid_in`` → what stands there unchanged: a run begins where its first site is.
        batch: at most so many rows in a pass.
        progress: told of every pass. what: a word for the runs.
    """
    axes = tap_names(asked.model.spec)
    pairs = len(asked.rows)
    step = max(1, batch // pairs)
    found = []
    with counted(progress, len(sites), what) as report:
        for i in range(0, len(sites), step):
            some = sites[i : i + step]
            by_name: dict[str, list[tuple[int, Site]]] = {}
            for place, site in enumerate(some):
                by_name.setdefault(site.name, []).append((place, site))
            edits = {
                name: put([(n * pairs, site) for n, site in here], axes[name], given[name], pairs)
                for name, here in by_name.items()
            }
            found.append(asked.answer(edits, len(some), first_layer([site.name for site in some], streams)))
            report(i + len(some), len(sites))
    return torch.cat(found)


def stream_of(name: str) -> str:
    """The stream that the layer of a quantity gets: ``decoder.layers.3.attn.z`` → ``decoder.layers.3.resid_in``."""
    return ".".join([*name.split(".")[:3], "resid_in"])


def first_layer(names: Sequence[str], streams: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """Where a run may begin that changes these: the stream of the first of their layers; None if it is not known."""
    found = min((stream_of(name) for name in names), key=lambda name: int(name.split(".")[2]))
    return (found, streams[found]) if found in streams else None


def put(here: list[tuple[int, Site]], axes: Sequence[str], given: Tensor, pairs: int) -> Callable[[Tensor], Tensor]:
    """An edit that puts each site's part into its rows."""

    def edit(value: Tensor) -> Tensor:
        for first, site in here:
            into, of = (site.index(axes, rows) for rows in (slice(first, first + pairs), slice(None)))
            value[into] = given[of]
        return value

    return edit


def check_texts(model: Transformer, name: str, rows: Texts, *, of_source: bool = False) -> list[list[int]]:
    """Texts of one length; with ``of_source``, of what an encoder–decoder's encoder reads.

    Raises:
        RequestError: none, or of different lengths, or a token that is none.
    """
    own = model.spec.source_vocab_size if of_source else None
    found = [check_ids(row, own or model.spec.vocab_size, name) for row in listed(name, rows, "lists of token ids")]
    if not found:
        raise RequestError("there are no texts", field=name, expected="at least one")
    if len({len(row) for row in found}) != 1:
        lengths = [len(row) for row in found]
        raise RequestError("texts of one length are needed", field=name, expected="as many tokens in each", got=lengths)
    return found


def check_at(model: Transformer, at: int | None, length: int, field: str = "answer_at") -> int:
    """The position whose answer is looked at, from the start.

    Raises:
        RequestError: none is stated where the last one means nothing, or there is no such position.
    """
    if at is None:
        if not model.spec.generates and "query" in tap_names(model.spec).get("logits", ()):
            hint = "Give the position of the blank."
            raise RequestError("this model has no last word: which position answers?", field=field, hint=hint)
        return length - 1
    if isinstance(at, bool) or not isinstance(at, int) or not -length <= at < length:
        raise RequestError("no such position", field=field, expected=f"an int below {length}", got=at)
    return at % length
