"""Spaces before punctuation taken out again, as ``clean_up_tokenization_spaces`` asks, while the text still arrives."""

from __future__ import annotations

from typing import final

__all__ = ["Tidy", "tidy"]

# In this order, as in transformers' clean_up_tokenization.
_PAIRS = [(" " + mark, mark) for mark in ".?!,"] + [(" ' ", "'")]
_PAIRS += [(" " + ending, ending) for ending in ("n't", "'m", "'s", "'ve", "'re")]


def tidy(text: str) -> str:
    """
    >>> tidy("it 's fine , is n't it ? the dogs ' tails")
    "it's fine, isn't it? the dogs'tails"
    """
    for old, new in _PAIRS:
        text = text.replace(old, new)
    return text


@final
class Tidy:
    """The same, piece by piece: what was pushed comes out once what follows cannot change it any more."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        self._held += text
        end = self._held.rfind(" ")
        while end > 0:
            # No rule reaches over a space whose left neighbour is a whole word, but for these two.
            start = self._held.rfind(" ", 0, end)
            if self._held[start + 1 : end] not in ("", "'", "n"):
                break
            end = start
        return self._take(max(end, 0))

    def flush(self) -> str:
        return self._take(len(self._held))

    def _take(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return tidy(text)
