"""What a sweep asks of the model's answer: one number of the scores at one position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection.readout import Spell
from cutaway.inspection.target import Target, in_words
from cutaway.inspection.target import measured as function_of

Metric: TypeAlias = Callable[[Tensor], Tensor] | Target
"""What a sweep asks: scores at one position, for each pair of texts → a number each. [..., pair, vocab] → [..., pair]

A :class:`Target` says the same of every pair, and is one. What it cannot say: another token for each pair
(:class:`TokenMetric`), or something else than one or two scores (a function). Those have no parts that add up, and are
no :class:`Target`: what is *explained* of one text.
"""


@dataclass(frozen=True, slots=True)
class TokenMetric:
    """The score of one token less that of another, or the log-probability of one; another for each pair, if so given.

    Attributes:
        token: one, or one for each pair. against: the other, of a difference.
    """

    token: tuple[int, ...]
    against: tuple[int, ...] | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """[..., pair, vocab] → [..., pair]"""
        if self.against is None:
            return _at(scores.log_softmax(-1), self.token)
        return _at(scores, self.token) - _at(scores, self.against)

    def words(self, spell: Spell | None = None) -> str:
        """What it is, for a title."""
        if len(self.token) > 1:
            return "log-probability" if self.against is None else "difference of two scores"
        write: Spell = str if spell is None else lambda token: f"“{spell(token)}”"
        if self.against is None:
            return f"log-probability of {write(self.token[0])}"
        return f"score of {write(self.token[0])} less that of {write(self.against[0])}"


def logit_difference(token: int | Sequence[int], against: int | Sequence[int]) -> TokenMetric:
    """How much higher one token scores than another; for several pairs of texts a token each, if they differ."""
    return TokenMetric(_each(token), _each(against))


def log_probability(token: int | Sequence[int]) -> TokenMetric:
    """The log-probability of a token, in nats."""
    return TokenMetric(_each(token))


def measured(metric: Metric, scores: Tensor) -> Tensor:
    """A metric's numbers, if they are such. [..., pair, vocab] → [..., pair]

    Raises:
        RequestError: something else than a number for each pair.
    """
    if isinstance(metric, Target):
        _check(metric, scores.shape[-1])
        metric = function_of(metric)
    if not callable(metric):
        raise RequestError("not a metric", field="metric", expected="a function of the scores", got=metric)
    value = metric(scores.float())
    if not isinstance(value, Tensor) or value.shape != scores.shape[:-1]:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        wanted = f"a tensor of shape {list(scores.shape[:-1])}"
        raise RequestError("a metric gives a number for each pair", field="metric", expected=wanted, got=got)
    return value.detach().double().cpu()


def words_of(metric: Metric, spell: Spell | None = None) -> str:
    """What is asked, for a title."""
    if isinstance(metric, Target):
        return in_words(metric)
    return metric.words(spell) if isinstance(metric, TokenMetric) else "metric"


def _check(target: Target, rows: int) -> None:
    if any(not 0 <= number < rows for number in target.ids):
        raise RequestError("not a token of the vocabulary", field="metric", expected=f"0…{rows - 1}", got=target.ids)


def _each(token: int | Sequence[int]) -> tuple[int, ...]:
    return (token,) if isinstance(token, int) else tuple(token)


def _at(scores: Tensor, tokens: tuple[int, ...]) -> Tensor:
    pairs, vocab = scores.shape[-2:]
    if any(isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab for t in tokens):
        raise RequestError("not a token of the vocabulary", field="metric", expected=f"0…{vocab - 1}", got=tokens)
    if len(tokens) not in (1, pairs):
        raise RequestError("not a token for each pair", field="metric", expected=pairs, got=len(tokens))
    index = torch.tensor(tokens, device=scores.device).expand(pairs)
    return scores.gather(-1, index[:, None].expand(*scores.shape[:-1], 1))[..., 0]
