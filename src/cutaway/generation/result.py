"""What comes of a prompt: text, tokens, what they cost, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cutaway.generation.logprobs import TokenLogprob
from cutaway.generation.pace import Speculation


@dataclass(frozen=True, slots=True)
class Usage:
    """What a generation cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens)

    @classmethod
    def of(cls, generations: Iterable[Generation]) -> Usage:
        """Of everything that one call gave: a prompt counts once, however many answers it has."""
        prompts, written = 0, 0
        for one in generations:
            prompts += one.usage.prompt_tokens if one.choice == 0 else 0
            written += one.usage.completion_tokens
        return cls(prompts, written)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long it took, in seconds since the run began. Answers that are written together share the machine.

    Attributes:
        prompt_s: until the prompts had been read; None if they were not.
        first_token_s: until this answer's first token; None where there is none, or where it came with all the others
            at the end of a search.
        total_s: until its last token.
        prompt_tokens, tokens: of the prompt, without what a session had read before, and of the answer.
    """

    prompt_s: float | None
    first_token_s: float | None
    total_s: float
    prompt_tokens: int
    tokens: int

    @property
    def decode_s(self) -> float | None:
        """From the first token, or else from the end of the prompt, to the last one."""
        since = self.prompt_s if self.first_token_s is None else self.first_token_s
        return None if since is None or not self.tokens else self.total_s - since

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """How fast the prompt was read."""
        return _rate(self.prompt_tokens, self.prompt_s)

    @property
    def tokens_per_s(self) -> float | None:
        """How fast the answer was written after its first token, which came with the prompt."""
        return _rate(self.tokens - (self.first_token_s is not None), self.decode_s)


def _rate(count: int, seconds: float | None) -> float | None:
    return count / seconds if count > 0 and seconds else None


@dataclass(frozen=True, slots=True)
class Generation:
    """What came of one prompt, or of one of its choices.

    Attributes:
        text: up to, and without, what ended it. Empty where there is no tokenizer.
        tokens: every produced id, an end token included.
        finish_reason: ``"stop"`` (an end token, a stop text, or a form that is complete) or ``"length"``
            (max_tokens, or the end of a learned table of positions); None while it is not finished.
        logprobs: one entry a token, if asked for: the model's own, before penalties, rules, temperature and filters.
        choice: which of the prompt's ``n`` choices it is; of beams the first is the best.
        score: of beams, the sum of the answer's log-probabilities over its length ** ``length_penalty``.
        prompt_logprobs: one entry a token of the prompt, if asked for; None for the first, which nothing precedes.
        processed_logprobs: one entry a token, if asked for: under the distribution that it was chosen from, after
            everything that changes or filters it.
        timing: how long it took; no part of a comparison.
        speculation: with a draft, how much of it was guessed; no part of a comparison.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    choice: int = 0
    score: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    processed_logprobs: list[TokenLogprob] | None = None
    timing: Timing | None = field(default=None, compare=False)
    speculation: Speculation | None = field(default=None, compare=False)
