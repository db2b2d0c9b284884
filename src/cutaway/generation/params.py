"""How to choose tokens and when to stop: a call's arguments over a checkpoint's own settings."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation import logits as steps
from cutaway.spec import GenerationSettings

_HUGE = 1.7976931348623157e308  # the largest float


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked settings of one call. See ``Model.generate`` for their meaning."""

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    n: int = 1
    logprobs: int | None = None

    def choose(
        self,
        logits: Tensor,
        prompts: Sequence[Sequence[int]],
        produced: Sequence[Sequence[int]],
        choices: Sequence[int],
    ) -> list[int]:
        """The next token of each row.

        Args:
            logits: [rows, vocab]
            prompts, produced: each row's tokens so far.
            choices: which of its prompt's ``n`` choices a row is.
        """
        x = logits.float()
        steps.check_finite(x)
        if self.repetition_penalty != 1:
            x = steps.repetition_penalty(
                x, [[*p, *q] for p, q in zip(prompts, produced, strict=True)], self.repetition_penalty
            )
        if self.frequency_penalty or self.presence_penalty:
            x = steps.count_penalties(x, produced, self.frequency_penalty, self.presence_penalty)
        if self.logit_bias:
            x = steps.logit_bias(x, self.logit_bias)
        steps.check_finite(x, changed=True)
        if self.temperature == 0:
            return steps.greedy(x)
        x = steps.temperature(x, self.temperature)
        if self.top_k:
            x = steps.top_k(x, self.top_k)
        if self.top_p < 1:
            x = steps.top_p(x, self.top_p)
        if self.min_p:
            x = steps.min_p(x, self.min_p)
        keys = [(self.seed, c, len(p) + len(q)) for c, p, q in zip(choices, prompts, produced, strict=True)]
        return steps.sample(x, keys)


MOST_CHOICES = 1024  # answers to one prompt: each is a row of the batch and of the cache


def resolve(
    own: GenerationSettings,
    vocab_size: int,
    *,
    max_tokens: int | None = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    stop: str | int | Sequence[str | int] | None = None,
    seed: int | None = None,
    n: int = 1,
    logprobs: int | None = None,
) -> Sampling:
    """Check a call's arguments, and take what it leaves out from the checkpoint.

    Raises:
        RequestError: a value that makes no sense, by name.
    """
    if max_tokens is not None:
        _whole("max_tokens", max_tokens, 0)
    _whole("n", n, 1, MOST_CHOICES)
    if logprobs is not None:
        _whole("logprobs", logprobs, 0)
    texts, ids = _stops(stop, vocab_size)
    if seed is not None:
        _whole("seed", seed, -(2**63), 2**63 - 1)
    # A temperature of one's own is a wish to sample as the model does, so the rest of its settings hold too.
    return Sampling(
        max_tokens=max_tokens,
        temperature=_number("temperature", own.temperature if temperature is None else temperature, 0),
        top_k=_whole("top_k", own.top_k if top_k is None else top_k, 0),
        top_p=_number("top_p", own.top_p if top_p is None else top_p, 0, 1),
        min_p=_number("min_p", 0.0 if min_p is None else min_p, 0, 1),
        repetition_penalty=_number(
            "repetition_penalty", 1.0 if repetition_penalty is None else repetition_penalty, 1e-6
        ),
        frequency_penalty=_number("frequency_penalty", 0.0 if frequency_penalty is None else frequency_penalty),
        presence_penalty=_number("presence_penalty", 0.0 if presence_penalty is None else presence_penalty),
        logit_bias=_biases(logit_bias, vocab_size),
        stop=texts,
        stop_ids=frozenset(own.eos_ids) | frozenset(ids),
        seed=secrets.randbits(63) if seed is None else seed,
        n=n,
        logprobs=logprobs,
    )


def _stops(stop: object, vocab_size: int) -> tuple[tuple[str, ...], list[int]]:
    """Texts and ids, apart."""
    words = [stop] if isinstance(stop, (str, int)) else [] if stop is None else stop
    if not isinstance(words, (list, tuple, set, frozenset)):
        raise RequestError("a stop is a text, not empty, or a token id, or a list of these", field="stop", got=stop)
    texts = tuple(word for word in words if isinstance(word, str))
    if "" in texts:
        raise RequestError("an empty stop would end every answer before it begins", field="stop")
    return texts, _tokens("stop", [word for word in words if not isinstance(word, str)], vocab_size)


def _biases(biases: object, vocab_size: int) -> dict[int, float]:
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError("not a mapping", field="logit_bias", expected="token id → number", got=biases)
    _tokens("logit_bias", list(biases), vocab_size)
    return {token: _number(f"logit_bias/{token}", bias) for token, bias in biases.items()}


def _whole(name: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        wanted = f"an int ≥ {low}" if high is None else f"an int in {low}…{high}"
        raise RequestError("not a whole number in range", field=name, expected=wanted, got=value)
    return value


def _number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    # A whole number too large for a float is as little use as infinity, and NaN is in no range.
    if not fits or not -_HUGE <= value <= _HUGE:  # type: ignore[operator]
        wanted = (
            "a number" if math.isinf(low) else f"a number ≥ {low}" if high == math.inf else f"a number in {low}…{high}"
        )
        raise RequestError("not a number in range", field=name, expected=wanted, got=value)
    return float(value)  # type: ignore[arg-type]


def _tokens(name: str, ids: list[object], vocab_size: int) -> list[int]:
    return check_ids(ids, vocab_size, name) if ids else []


def check_ids(ids: Iterable[object], vocab_size: int, field: str = "prompt") -> list[int]:
    """Token ids, if they are usable.

    Raises:
        RequestError: none, or one outside the vocabulary.
    """
    found = list(ids)
    if not found:
        raise RequestError("there are no tokens", field=field, expected="at least one")
    for place, token in enumerate(found):
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise RequestError(
                "not a token of this vocabulary", field=f"{field}/{place}", expected=f"0…{vocab_size - 1}", got=token
            )
    return [int(token) for token in found]  # type: ignore[call-overload]
