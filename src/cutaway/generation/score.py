"""How likely a text is, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cutaway.cache import Source
from cutaway.generation.checks import check_ids
from cutaway.generation.logprobs import token_logprobs
from cutaway.generation.session import CHUNK, check_length
from cutaway.generation.steady import promise, unembedded
from cutaway.models import Transformer
from cutaway.models.batch import pad
from cutaway.modules.steady import ROWS


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a text is, token by token.

    Attributes:
        tokens: its ids, a first token that the tokenizer adds included.
        logprobs: log-probability of each given those before; None for the first.
    """

    tokens: list[int]
    logprobs: list[float | None]

    @property
    def total(self) -> float:
        """Log-probability of the whole after its first token."""
        return sum(value for value in self.logprobs if value is not None)


@torch.no_grad()
def score_ids(
    model: Transformer, ids: Sequence[int], source: Source | None = None, *, steady: bool = False
) -> list[float | None]:
    """Log-probability of each token given those before it; None for the first, which has nothing before it.

    Args:
        model: what reads.
        ids: a text; of an encoder–decoder, with the token that answers begin with.
        source: what an encoder–decoder's encoder has read.
        steady: the bits that a token has in any company: see ``generation.steady``.

    Raises:
        RequestError: steady, where that cannot be kept.
    """
    if steady:
        promise(model)
    ids = check_ids(ids, model.spec.vocab_size)
    check_length(model, len(ids), "prompt")
    table, positions = pad([ids], multiple=ROWS if steady else 1)
    hidden = model.hidden(table, positions, source=source, how="steady" if steady else None)[0, : len(ids) - 1]
    scores: list[float | None] = [None]
    for start in range(0, len(ids) - 1, CHUNK):  # logits of a long text, with a large vocabulary, are gigabytes
        some = hidden[start : start + CHUNK]
        piece = unembedded(model, some) if steady else model.unembed(some[None])[0]
        scores += [entry.logprob for entry in token_logprobs(piece, ids[start + 1 : start + 1 + CHUNK], 0)]
    return scores
