"""A Unigram model for text in which control strings are text.

Unigram has its control tokens among the pieces, with the best of scores, so that a typed ``</s>`` would become one.
SentencePiece never finds them in a text; nor does this model, in which they have other names.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import tokenizers
from cutaway.tokenizers.rust import rust_errors

__all__ = ["hide", "plain_model"]


def plain_model(tree: dict[str, Any], special: Mapping[str, int]) -> Any:
    """The same model, ids and scores without ``special``; None for other kinds of model.

    Args:
        tree: a tokenizer.json.
        special: strings of control tokens.
    """
    model = tree["model"]
    if model.get("type") != "Unigram":
        return None
    unknown = model.get("unk_id")
    hidden = {i for i, (piece, _) in enumerate(model["vocab"]) if piece in special and len(piece) > 1} | {unknown}
    pieces = [(piece, float(score)) for piece, score in hide(model["vocab"], hidden)]
    with rust_errors("pieces cannot be built", field="/model"):
        return tokenizers.models.Unigram(pieces, unk_id=unknown, byte_fallback=bool(model.get("byte_fallback")))


def hide(pieces: Iterable[Any], ids: Container[int | None]) -> list[list[Any]]:
    """The same pieces with names for those ``ids`` that no text has.

    They have spaces in them, which are ▁ by then; the rest is for tokenizers without that.
    """
    return [[f"\uffff {i} \uffff" if i in ids else piece, score] for i, (piece, score) in enumerate(pieces)]
