"""How well a model expects a text: the measure that quantizing is judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.errors import DatasetError
from cutaway.formats.files import read_small

if TYPE_CHECKING:
    from collections.abc import Callable

    from cutaway.model import Model

WINDOW = 512  # tokens that are read together
_MOST = 64 << 20  # bytes of a text
_OWN = Path(__file__).with_name("quantize.txt")  # a page of prose, written for this


@dataclass(frozen=True, slots=True)
class Expected:
    """What a model thought of a text.

    Attributes:
        logprobs: of each token but the first of each window.
    """

    logprobs: list[float]

    @property
    def perplexity(self) -> float:
        """The choices that a token seemed to be one of: e to the mean of minus the log-probability."""
        mean = -sum(self.logprobs) / len(self.logprobs)
        return math.exp(mean) if mean < 700 else math.inf


def why_not(model: Model) -> str | None:
    """Why a model has no perplexity, or None."""
    if not model.spec.generates or model.spec.source is not None:
        return "only a decoder expects a next token of a text"
    return "this model came without a tokenizer" if model.tokenizer is None else None


def text_of(path: str | None) -> str:
    """The text of a file, or the page that comes with cutaway.

    Raises:
        DatasetError: it is no UTF-8, or empty.
        LimitExceeded, StorageError: it is too large, or cannot be read.
    """
    at = _OWN if path is None else Path(path)
    try:
        text = read_small(at, limit=_MOST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError("is not UTF-8", path=at, offset=error.start) from error
    if not text.strip():
        raise DatasetError("is empty", path=at, expected="a text")
    return text


def expected(model: Model, text: str, progress: Callable[[int, int], None] | None = None) -> Expected:
    """Read a text, in windows of ``WINDOW`` tokens, each of which begins anew.

    Args:
        model: a decoder with a tokenizer.
        text: what is read.
        progress: told (tokens read, in all).

    Raises:
        DatasetError: it is one token.
    """
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(text)
    bos = ids[:1] if model.tokenizer.adds_bos else []
    body = ids[len(bos) :]
    width = min(WINDOW, model.spec.max_positions) - len(bos)
    found: list[float] = []
    for start in range(0, len(body), width):
        window = [*bos, *body[start : start + width]]
        if len(window) > 1:
            found += [value for value in model.score(window).logprobs if value is not None]
        if progress is not None:
            progress(min(start + width, len(body)), len(body))
    if not found:
        raise DatasetError("is too short", expected="two tokens or more", got=len(ids))
    return Expected(found)
