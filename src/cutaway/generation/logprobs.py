"""How likely the model found what was produced, and what it was given to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.generation.steady import unembedded
from cutaway.models import Transformer

LARGEST = 1 << 24  # logits that are made at once of a prompt: of a long one, all of them would be gigabytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability at its place.

    ``tokenizer.token_bytes(token)`` is what it adds to the text, exactly, half a character too.

    Attributes:
        token: its id.
        logprob: natural logarithm.
        top: the likeliest tokens at this place, best first, as (id, logprob). Those that cannot come, whose
            log-probability is −inf, are left out.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of chosen tokens and of the likeliest ones. [rows, vocab]"""
    return listed(logits.float().log_softmax(-1), tokens, top)


def listed(logprobs: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The same of what are log-probabilities already. [rows, vocab]"""
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logprobs.shape[1]))
    return [
        TokenLogprob(token, logprob, tuple((i, v) for i, v in zip(ids, values, strict=True) if v > float("-inf")))
        for token, logprob, ids, values in zip(tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def read_logprobs(
    model: Transformer, hidden: Tensor, tokens: Sequence[int], top: int, *, steady: bool
) -> list[TokenLogprob]:
    """Log-probabilities of the tokens that came after some others, a bounded number of logits at a time.

    Args:
        model: has the head.
        hidden: the final state at the token before each. [len(tokens), d_model]
        tokens: which came.
        top: how many of the likeliest to report.
        steady: the bits that a token has in any company.
    """
    found: list[TokenLogprob] = []
    at_once = max(1, LARGEST // model.spec.vocab_size)
    for start in range(0, len(tokens), at_once):
        some = hidden[start : start + at_once]
        logits = unembedded(model, some) if steady else model.unembed(some[None])[0]
        found += token_logprobs(logits, tokens[start : start + at_once], top)
    return found


class PromptLogprobs:
    """Listens while prompts are read, and notes how likely each of their tokens was.

    Args:
        model: what reads.
        prompts: what it is about to read, from their beginnings.
        top: how many of the likeliest to report.
        steady: whether it reads steadily.
    """

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]], top: int, steady: bool) -> None:
        self._model = model
        self._prompts = prompts
        self._top = top
        self._steady = steady
        self.found: list[list[TokenLogprob | None]] = [[None] for _ in prompts]

    @torch.no_grad()
    def __call__(self, hidden: Tensor, counts: Sequence[int]) -> None:
        """Take the final states of each row's next tokens. [batch, piece, d_model], of which ``counts`` are real"""
        for states, n, prompt, found in zip(hidden, counts, self._prompts, self.found, strict=True):
            following = prompt[len(found) : len(found) + n]
            found += read_logprobs(self._model, states[: len(following)], following, self._top, steady=self._steady)
