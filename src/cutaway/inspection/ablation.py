"""What it costs to take heads away: the loss of the next token without them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.generation.checks import whole
from cutaway.inspection.change import Edit
from cutaway.inspection.figure import Bars, Figure, Grid, Part
from cutaway.inspection.listed import listed
from cutaway.inspection.readout import blocks, numbers, scored
from cutaway.inspection.running import trace
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.sites import Texts, check_texts, first_layer, stream_of
from cutaway.inspection.steps import Progress, counted
from cutaway.models import Transformer
from cutaway.spec import AttentionSpec
from cutaway.spec.names import axis_sizes, tap_names

How: TypeAlias = Literal["zero", "mean"]
Head: TypeAlias = tuple[str, int]
"""A branch's name, such as ``decoder.layers.3.attn``, and which head of it."""


@dataclass(frozen=True, slots=True, repr=False)
class Ablation(Shown):
    """The loss without each head.

    Attributes:
        layers: names of the branches.
        losses: mean loss of the next token without a head, in nats; NaN where there is none. [layer, head]
        base: the loss with all of them.
        how: what stands in a head's place: nothing, or its mean over these texts.
    """

    layers: tuple[str, ...]
    losses: Tensor
    base: float
    how: How

    @property
    def rise(self) -> Tensor:
        """By how much the loss is higher without each. [layer, head]"""
        return self.losses - self.base

    def top(self, n: int = 10) -> list[tuple[str, int, float]]:
        """The heads that cost most to lose: (branch, head, rise)."""
        flat, width = self.rise.flatten().nan_to_num(nan=float("-inf")), self.losses.shape[1]
        best = flat.topk(min(whole("n", n, 0), len(flat))).indices.tolist()
        return [(self.layers[i // width], i % width, float(flat[i])) for i in best if flat[i] > float("-inf")]

    def figure(self) -> Figure:
        """A grid, and the costliest."""
        heads = [str(i) for i in range(self.losses.shape[1])]
        grid = Grid("Rise of the loss", self.layers, heads, numbers(self.rise), None, "signed", "head", "layer")
        best = self.top(8)
        bars = Bars("Costliest to lose", [f"{at}[{h}]" for at, h, _ in best], [v for *_, v in best], "nats", "signed")
        parts: list[Part] = [grid, bars]
        said = "Losses are the model's own. What other heads make up for does not show; zero is no usual value, and "
        return Figure(f"Without each head ({self.how})", parts, (f"{said}can cost more than what a head does.",))

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        rise = {"losses": numbers(self.losses), "rise": numbers(self.rise)}
        return {"layers": [*self.layers], **rise, "base": self.base, "how": self.how}


def heads_of(model: Transformer, stack: str | None = None) -> dict[str, int]:
    """Name of a branch with attention → how many heads it has, in order."""
    stack = stack or model.spec.main
    return {
        f"{stack}.layers.{i}.{branch.name}": branch.body.n_heads
        for i, layer in enumerate(model.spec.stacks[stack].layers)
        for branch in layer.branches
        if isinstance(branch.body, AttentionSpec)
    }


@torch.no_grad()
def loss_without(
    model: Transformer,
    ids: Texts,
    heads: Collection[Head] = (),
    *,
    how: How = "zero",
    first: int = 1,
    sources: Texts | None = None,
) -> float:
    """Mean loss of the next token, in nats, with some heads taken away together.

    Args:
        model: one that says what comes next.
        ids: texts of one length.
        heads: (branch, head) each, such as ``("decoder.layers.3.attn", 5)``.
        how: ``"zero"``: what the head reads is nothing; ``"mean"``: its mean over these texts and positions.
        first: the first token whose loss counts; of tokens repeated, where the repetition begins.
        sources: of an encoder–decoder.

    Raises:
        RequestError: a model that does not say what comes next, or no such position.
        NameNotFound: no such head.
    """
    return float(_losses(model, ids, [listed("heads", heads, "(branch, head)")], how, first, sources, 1 << 30, None)[0])


@torch.no_grad()
def ablation_sweep(
    model: Transformer,
    ids: Texts,
    *,
    how: How = "zero",
    first: int = 1,
    sources: Texts | None = None,
    batch: int = 32,
    progress: Progress | bool | None = None,
) -> Ablation:
    """The loss without each head of the stack that ends at the head, one at a time.

    Args:
        model, ids, how, first, sources: see :func:`loss_without`.
        batch: at most so many texts in a pass.
        progress: called with how many heads are done and how many there are; True for a line.
    """
    layers = heads_of(model)
    every = [(at, head) for at, n in layers.items() for head in range(n)]
    each = [[one] for one in every]
    losses = _losses(model, ids, [(), *each], how, first, sources, whole("batch", batch, 1), progress)
    grid = torch.full((len(layers), max(layers.values(), default=0)), float("nan"))
    for (at, head), loss in zip(every, losses[1:].tolist(), strict=True):
        grid[[*layers].index(at), head] = loss
    return Ablation(tuple(layers), grid, float(losses[0]), how)


def _losses(
    model: Transformer,
    ids: Texts,
    without: Sequence[Collection[Head]],
    how: How,
    first: int,
    sources: Texts | None,
    batch: int,
    progress: Progress | bool | None,
) -> Tensor:
    """The mean loss without each collection of heads. [collection]"""
    if not model.spec.generates:
        raise RequestError("this model does not say what comes next", field="model")
    if how not in ("zero", "mean"):
        raise RequestError("no such way", field="how", expected="zero or mean", got=how)
    rows = check_texts(model, "ids", ids)
    if len(rows[0]) < 2:
        what = "too short for a next token"
        raise RequestError(what, field="ids", expected="at least 2 tokens", got=len(rows[0]))
    whole("first", first, 1, len(rows[0]) - 1)
    every = list(dict.fromkeys(head for heads in without for head in heads))
    names = _checked(model, every)
    read = None if sources is None else check_texts(model, "sources", sources, of_source=True)
    given: dict[str, Tensor] = {}
    if how == "mean":
        given = {
            k: v.mean((0, 1)) for k, v in trace(model, rows, tuple(dict.fromkeys(names.values())), sources=read).items()
        }
    end, n = f"{model.spec.main}.norm.out", len(rows)
    streams: Mapping[str, Tensor] = {}
    if len(without) > 2:  # runs that begin where their first head is
        names_of = tuple(dict.fromkeys(stream_of(name) for name in names.values()))
        streams = trace(model, rows, names_of, sources=read, stop=True)
    step, found = max(1, batch // n), []
    with counted(progress, len(without), "heads") as report:
        for i in range(0, len(without), step):
            some = without[i : i + step]
            by_name: dict[str, list[tuple[int, int]]] = {}
            for place, heads in enumerate(some):
                for head in heads:
                    by_name.setdefault(names[head], []).append((place * n, head[1]))
            edits = {name: _taken(here, n, given.get(name)) for name, here in by_name.items()}
            more = None if read is None else read * len(some)
            begin = first_layer([*edits], streams) if all(some) else None
            begin = None if begin is None else (begin[0], begin[1].repeat(len(some), 1, 1))
            hidden = trace(model, rows * len(some), (end,), edits, sources=more, start=begin, stop=True)[end]
            found.append(_next(model, hidden, rows * len(some), first).unflatten(0, (len(some), n)).mean((1, 2)))
            report(i + len(some), len(without))
    return torch.cat(found)


def _checked(model: Transformer, heads: Sequence[Head]) -> dict[Head, str]:
    """What each head reads, by name."""
    known = tap_names(model.spec)
    every: Sequence[Any] = heads
    for pair in every:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            hint = f'Such as ("{model.spec.main}.layers.0.attn", 5).'
            raise RequestError("not a head", field="heads", expected="(branch, head) each", got=repr(pair), hint=hint)
        at, head = pair
        if f"{at}.z" not in known:
            near = f"{model.spec.main}.layers.0.attn"
            raise NameNotFound("no branch with heads has this name", field=at, hint=f"A name is such as {near}.")
        n = axis_sizes(model.spec, f"{at}.z")["head"]
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < n:
            raise RequestError("no such head", field=at, expected=f"0…{n - 1}", got=head)
    return {(at, head): f"{at}.z" for at, head in heads}


def _taken(here: Sequence[tuple[int, int]], n: int, mean: Tensor | None) -> Edit:
    """An edit that takes heads away, each in its own rows."""

    def edit(z: Tensor) -> Tensor:
        for first, head in here:
            z[first : first + n, :, head] = 0.0 if mean is None else mean[head]
        return z

    return edit


def _next(model: Transformer, hidden: Tensor, rows: Texts, first: int) -> Tensor:
    """The loss of every token from the first that counts on. [row, token]"""
    goal = torch.tensor([list(row) for row in rows])[:, first:].flatten()
    x = hidden[:, first - 1 : -1].flatten(0, 1)
    losses = []
    for block in blocks(len(x), model.spec.vocab_size):
        scores = scored(model, x[block])
        losses.append(torch.nn.functional.cross_entropy(scores, goal[block].to(scores.device), reduction="none").cpu())
    return torch.cat(losses).unflatten(0, (len(rows), -1)).double()
