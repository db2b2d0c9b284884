"""The settings of one call, and the way from logits to a token under them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cutaway.cache import KvDtype
from cutaway.generation import logits as steps
from cutaway.generation.constrain import Constraint
from cutaway.generation.rules import Rules

NO_RULES = Rules()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked settings of one call. See ``Model.generate`` for their meaning.

    Attributes:
        max_length: most tokens of prompt and answer together; holds where ``max_tokens`` is None and a prompt leaves
            room for one.
        bad_words: forbidden texts, which only a tokenizer can turn into the ids that ``rules`` has.
        constraint: the form of the answer, which masks logits after all of ``changed`` and before the temperature.
        kv_dtype: a smaller type to keep keys and values in.
        renormalize: beams add up log-probabilities of the tokens that the rules leave, made to sum to one again.
    """

    max_tokens: int | None = 256
    max_length: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature_last: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    rules: Rules = NO_RULES
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    n: int = 1
    logprobs: int | None = None
    processed_logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    deterministic: bool = False
    kv_dtype: KvDtype | None = None
    renormalize: bool = False
    constraint: Constraint | None = None

    def changed(
        self,
        logits: Tensor,
        prompts: Sequence[Sequence[int]],
        produced: Sequence[Sequence[int]],
        rooms: Sequence[int | None] | None = None,
    ) -> Tensor:
        """Logits, or log-probabilities, after penalties, biases and rules. [rows, vocab] → the same

        Args:
            prompts, produced: each row's tokens so far.
            rooms: most tokens that each row's answer may have.
        """
        x = logits
        if self.repetition_penalty != 1:
            seen = [[*p, *q] for p, q in zip(prompts, produced, strict=True)]
            x = steps.repetition_penalty(x, seen, self.repetition_penalty)
        if self.frequency_penalty or self.presence_penalty:
            x = steps.count_penalties(x, produced, self.frequency_penalty, self.presence_penalty)
        if self.logit_bias:
            x = steps.logit_bias(x, self.logit_bias)
        if self.rules != NO_RULES:
            x = self.rules.apply(x, prompts, produced, rooms or [None] * len(prompts), self.stop_ids)
        return x

    def processed(
        self,
        logits: Tensor,
        prompts: Sequence[Sequence[int]],
        produced: Sequence[Sequence[int]],
        rooms: Sequence[int | None] | None = None,
        mask: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """What a token is chosen from: its softmax is drawn from, or its best is taken. [rows, vocab] → the same

        Args:
            prompts, produced: each row's tokens so far.
            rooms: most tokens that each row's answer may have.
            mask: forbids what breaks the answers' form.
        """
        x = logits.float()
        steps.check_finite(x)
        x = self.changed(x, prompts, produced, rooms)
        if x is not logits:
            steps.check_finite(x, changed=True)
        if mask is not None:
            x = mask(x)
        if self.temperature == 0:
            return x
        if not self.temperature_last:
            x = steps.temperature(x, self.temperature)
        if self.top_k:
            x = steps.top_k(x, self.top_k)
        if self.top_p < 1:
            x = steps.top_p(x, self.top_p)
        if self.min_p:
            x = steps.min_p(x, self.min_p)
        return steps.temperature(x, self.temperature) if self.temperature_last else x

    def take(self, processed: Tensor, keys: Sequence[tuple[int, int, int]]) -> list[int]:
        """A token of each row of what is :meth:`processed`; ``keys`` are (seed, choice, position)."""
        return steps.greedy(processed) if self.temperature == 0 else steps.sample(processed, keys)

    def choose(
        self,
        logits: Tensor,
        prompts: Sequence[Sequence[int]],
        produced: Sequence[Sequence[int]],
        choices: Sequence[int],
        rooms: Sequence[int | None] | None = None,
    ) -> list[int]:
        """The next token of each row; ``choices`` says which of its prompt's ``n`` choices a row is."""
        keys = [(self.seed, c, len(p) + len(q)) for c, p, q in zip(choices, prompts, produced, strict=True)]
        return self.take(self.processed(logits, prompts, produced, rooms), keys)
