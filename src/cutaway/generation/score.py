"""How likely a text is, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from cutaway.cache import KvDtype, Source, check_kv_dtype
from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids, whole
from cutaway.generation.inputs import plain
from cutaway.generation.logprobs import TokenLogprob, read_logprobs
from cutaway.generation.reading import check_length, read_sources
from cutaway.generation.steady import promise
from cutaway.generation.unmixed import unmixed
from cutaway.generation.voice import Voice
from cutaway.models import Transformer
from cutaway.models.batch import pad
from cutaway.modules.steady import ROWS

Text: TypeAlias = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a text is, token by token.

    Attributes:
        tokens: its ids, a first token that the tokenizer adds included.
        logprobs: log-probability of each given those before; None for the first.
        top: if asked for, the likeliest tokens at each place, best first, as (id, logprob); none at the first.
    """

    tokens: list[int]
    logprobs: list[float | None]
    top: list[tuple[tuple[int, float], ...]] | None = None

    @property
    def total(self) -> float:
        """Log-probability of the whole after its first token."""
        return sum(value for value in self.logprobs if value is not None)

    def entries(self) -> list[TokenLogprob | None]:
        """The same as a generation reports its prompt: one for each token, None for the first."""
        best = self.top or [()] * len(self.tokens)
        return [
            None if value is None else TokenLogprob(token, value, top)
            for token, value, top in zip(self.tokens, self.logprobs, best, strict=True)
        ]

    @classmethod
    def of(cls, tokens: list[int], entries: Sequence[TokenLogprob | None], top: int) -> Score:
        """As a list of numbers, and one of alternatives if there are to be any."""
        best = [() if entry is None else entry.top for entry in entries]
        return cls(tokens, [None if entry is None else entry.logprob for entry in entries], best if top else None)


def score(
    voice: Voice,
    text: Text,
    target: Text | None = None,
    *,
    top: int = 0,
    deterministic: bool = False,
    kv_dtype: KvDtype | None = None,
) -> Score:
    """See ``Model.score``."""
    voice.must_generate()
    model = voice.model
    whole("top", top, 0)
    check_kv_dtype(kv_dtype)
    ids = voice.ids(text, "text")
    if (target is None) is not (model.spec.source is None):
        what = "an encoder–decoder scores a target for a source, other models score one text"
        raise RequestError(what, field="target", got=target)
    if target is None:
        return Score.of(ids, score_ids(model, ids, top=top, steady=deterministic, kv_dtype=kv_dtype), top)
    if isinstance(target, str):
        mine = voice.cutter("target").target.encode(target)
    else:
        mine = check_ids(plain(target), model.spec.vocab_size, "target")
    source = read_sources(model, [ids], steady=deterministic)
    whole_target = [*voice.start(), *mine]
    entries = score_ids(model, whole_target, source, top=top, steady=deterministic, kv_dtype=kv_dtype)
    return Score.of(mine, entries[1:], top)


@torch.no_grad()
def score_ids(
    model: Transformer,
    ids: Sequence[int],
    source: Source | None = None,
    *,
    top: int = 0,
    steady: bool = False,
    kv_dtype: KvDtype | None = None,
) -> list[TokenLogprob | None]:
    """Log-probability of each token given those before it; None for the first, which has nothing before it.

    Args:
        model: what reads.
        ids: a text; of an encoder–decoder, with the token that answers begin with.
        source: what an encoder–decoder's encoder has read.
        top: how many of the likeliest tokens to report at each place.
        steady: the bits that a token has in any company: see ``generation.steady``.
        kv_dtype: a smaller type that keys and values go through, as they do where they are kept in it.

    Raises:
        RequestError: steady, where that cannot be kept.
    """
    if steady:
        promise(model)
    ids = check_ids(ids, model.spec.vocab_size)
    check_length(model, len(ids), "prompt")
    table, positions = pad([ids], multiple=ROWS if steady else 1)
    cache = None
    if kv_dtype is not None:
        cache = model.new_cache(1, len(ids), sliding=False, source=source, kv_dtype=kv_dtype)
    own = source if cache is None else None  # a cache has it
    with unmixed(model.device):
        hidden = model.hidden(table, positions, cache=cache, source=own, how="steady" if steady else None)
        return [None, *read_logprobs(model, hidden[0, : len(ids) - 1], ids[1:], top, steady=steady)]
