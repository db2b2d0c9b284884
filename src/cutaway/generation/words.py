"""Forbidden texts as the tokens that they may come as."""

from __future__ import annotations

from dataclasses import replace

from cutaway.errors import RequestError
from cutaway.generation.sampling import Sampling
from cutaway.tokenizers.tokenizer import Tokenizer


def with_words(sampling: Sampling, tokenizer: Tokenizer | None) -> Sampling:
    """The settings with forbidden texts as ids: of the text at a beginning, of it going on, and of it after a space.

    Raises:
        RequestError: there is no tokenizer.
    """
    if not sampling.bad_words:
        return sampling
    if tokenizer is None:
        raise RequestError("forbidden texts need a tokenizer, and this model has none", field="bad_words")
    found: dict[tuple[int, ...], None] = {}
    for word in sampling.bad_words:
        found[tuple(tokenizer.encode(word, bos=False))] = None
        for text in (word, " " + word):
            found[tuple(tokenizer.encode(text, continuation=True))] = None
    rules = replace(sampling.rules, bad_words=(*sampling.rules.bad_words, *(ids for ids in found if ids)))
    return replace(sampling, rules=rules, bad_words=())
