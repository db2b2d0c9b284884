"""How likely the model found what was produced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A produced token's log-probability under the model, before any filter.

    Attributes:
        token: its id.
        logprob: natural logarithm.
        top: the likeliest tokens at this place, best first, as (id, logprob).
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of chosen tokens and of the likeliest ones. [rows, vocab]"""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logprobs.shape[1]))
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
