"""From the stream to scores of tokens: the last norm and the head, for whoever reads the stream before its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection.listed import listed
from cutaway.look import Look, visible
from cutaway.models import Transformer
from cutaway.models.head import Head
from cutaway.modules.norm import Norm
from cutaway.modules.stack import Stack
from cutaway.spec import HeadSpec, NormSpec

Spell: TypeAlias = Callable[[int], str]  # a token's id → how it is written

LARGEST = 1 << 22  # numbers in a block of scores of a whole vocabulary


def main_stack(model: Transformer) -> Stack:
    """The stack whose output the head reads."""
    return model.decoder if model.spec.main == "decoder" else model.encoder


def token_head(model: Transformer) -> Head:
    """The head, where it scores tokens.

    Raises:
        RequestError: it does not, or there is none.
    """
    if not isinstance(model.head, Head):
        got = "no head" if model.head is None else type(model.head).__name__.lower()
        raise RequestError("this model has no head that scores tokens", field="head", got=got)
    return model.head


def scored(model: Transformer, x: Tensor) -> Tensor:
    """Scores of tokens, in fp32, for vectors as they leave the last norm. [row, d_model] → [row, vocab]"""
    return model.unembed(x[None])[0].float()


def read_out(model: Transformer, x: Tensor) -> Tensor:
    """The same for vectors of the stream, as if it ended there. [row, d_model] → [row, vocab]"""
    return scored(model, main_stack(model).norm(x))


def contributed(model: Transformer, x: Tensor) -> Tensor:
    """What vectors that the last norm has been applied to add to the scores, before a cap and without the head's bias.

    [..., d_model] → [..., vocab], in fp32
    """
    head = token_head(model)
    table = model.embed.table if head.weight is None else head.weight
    return head.product(x, table, None).float() * head.spec.scale


def held(norm: torch.nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    """The part of a norm that is linear: ``scale``, one over a spread, is given rather than that of ``x``; no bias.

    Args:
        norm: a norm, or nothing in its place.
        x: [..., d_model]
        scale: [..., 1]
    """
    if not isinstance(norm, Norm):
        return x
    even = x.float() - x.float().mean(-1, keepdim=True) if norm.spec.kind == "layer" else x.float()
    return even * scale.float() * (norm.weight.float() + norm.spec.offset)


def spread(spec: NormSpec, x: Tensor) -> Tensor:
    """One over the spread that a norm would divide by: its ``norm_scale``. [..., d_model] → [..., 1]"""
    full = x.float() - x.float().mean(-1, keepdim=True) if spec.kind == "layer" else x.float()
    return torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + spec.eps)


def whole_sum(model: Transformer) -> bool:
    """Whether the stream is the sum of what was written to it: no norm is applied to the stream itself."""
    layers = main_stack(model).spec.layers
    return all(branch.post_norm is None for layer in layers for branch in layer.branches)


def check_whole_sum(model: Transformer) -> None:
    """Refuse a stream that is no pure sum, or a head that bends it: then a part has no score of its own.

    Raises:
        RequestError: norms on the stream itself, or a head with a curve.
    """
    if not whole_sum(model):
        hint = "Look at the stream itself: *.resid."
        raise RequestError("this model norms the stream itself, which is no sum of parts", field="at", hint=hint)
    if isinstance(model.spec.head, HeadSpec) and model.spec.head.transform is not None:
        hint = "Look at the stream itself: *.resid."
        raise RequestError("this model's head has a curve, through which parts do not add up", field="at", hint=hint)


def blocks(n: int, width: int) -> Iterator[slice]:
    """Slices of ``n`` rows, so small that a block of them, ``width`` numbers each, stays within ``LARGEST``."""
    step = max(1, LARGEST // max(1, width))
    for i in range(0, n, step):
        yield slice(i, min(i + step, n))


def table_of(model: Transformer, which: str) -> Tensor:
    """The ``"input"`` or ``"output"`` table of tokens, perhaps stored. [vocab, d_model]

    Raises:
        RequestError: another word, or there is no such table.
    """
    if which == "input":
        return model.embed.table
    if which == "output":
        head = token_head(model)
        return model.embed.table if head.weight is None else head.weight
    if which == "source" and model.source_embed is not None and model.source_embed.tokens is not None:
        return model.source_embed.tokens
    raise RequestError("no such table", field="table", expected="input, output, or source of two tables", got=which)


def rows_of(table: Tensor, ids: Sequence[int] | slice) -> Tensor:
    """Some rows of a table, in fp32: of a stored one, these alone are made. [n, d_model]"""
    places = list(range(table.shape[0])[ids]) if isinstance(ids, slice) else list(ids)
    found = F.embedding(torch.tensor(places, dtype=torch.long, device=table.device), table.detach())
    return found.float()


def numbers(values: Tensor) -> Any:
    """Nested lists; None for what is not a number."""
    if values.dim() == 0:
        value = values.item()
        return None if value != value else value
    return [numbers(value) for value in values]


def seen(word: str) -> str:
    """A token among others in a line, its spaces shown."""
    return visible(word, Look())


def percent(share: float) -> str:
    """
    >>> percent(0.613), percent(0.00004)
    ('61.3 %', '<0.1 %')
    """
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def labels(ids: Sequence[int], pieces: Sequence[str] | None) -> list[str]:
    """A text for each position: the piece, or else the id.

    Raises:
        RequestError: not as many as there are ids.
    """
    if pieces is None:
        return [str(token) for token in ids]
    if len(listed("pieces", pieces, "texts")) != len(ids):
        raise RequestError("not a piece for each token", field="pieces", expected=len(ids), got=len(pieces))
    return list(pieces)
