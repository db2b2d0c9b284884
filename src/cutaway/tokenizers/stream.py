"""Text as its tokens arrive: whole characters only, and together exactly the whole decode."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Literal, TypeAlias, final

from cutaway.tokenizers.tidy import Tidy

__all__ = ["ByteStream", "DecodeStream", "Start", "WordStream"]

Start: TypeAlias = Literal["", "one", "all"]
"""Which spaces go at a text's start: none, one, or all white space."""


@final
class DecodeStream:
    """Turns ids into finished characters. ``"".join(pushes) + flush()`` is ``decode(ids)``.

    A character that spans tokens is held back until it is complete; UTF-8's longest has four
    bytes, so at most three tokens wait. Bytes that can no longer become a character are U+FFFD.
    With ``tidy``, a word waits for the one after it.
    """

    def __init__(self, take: ByteStream | WordStream, tidy: Tidy | None = None) -> None:
        self._take = take
        self._tidy = tidy

    def push(self, token_id: int) -> str:
        """The text that this id finishes; often a word, sometimes nothing."""
        text = self._take.push(token_id)
        return text if self._tidy is None else self._tidy.push(text)

    def flush(self) -> str:
        """What was still held back, at the end. The stream then starts anew."""
        text = self._take.flush()
        return text if self._tidy is None else self._tidy.push(text) + self._tidy.flush()


@final
class ByteStream:
    """For vocabularies whose tokens are bytes.

    Args:
        spell: gives them, None to skip the token.
        start, end: what of the text's own white space goes at its ends.
    """

    def __init__(self, spell: Callable[[int], bytes | None], *, start: Start, end: bool) -> None:
        self._spell = spell
        self._start = start
        self._end = end
        self._at_start = bool(start)
        self._space = ""  # white space that the text may yet turn out to end with
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        data = self._spell(token_id)
        return self._emit(self._utf8.decode(data)) if data else ""

    def flush(self) -> str:
        text = self._emit(self._utf8.decode(b"", True))
        self._utf8.reset()
        self._at_start, self._space = bool(self._start), ""
        return text

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            text = text.lstrip() if self._start == "all" else text.removeprefix(" ")
            self._at_start = self._start == "all" and not text
        if not self._end:
            return text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown


@final
class WordStream:
    """For vocabularies whose tokens depend on their left neighbour: decodes a window of two."""

    def __init__(self, keep: Callable[[int], bool], decode: Callable[[list[int]], str]) -> None:
        self._keep = keep
        self._decode = decode
        self._last: int | None = None
        self._shown = ""

    def push(self, token_id: int) -> str:
        if not self._keep(token_id):
            return ""
        both = self._decode([token_id] if self._last is None else [self._last, token_id])
        text = both[len(self._shown) :]
        self._last = token_id
        self._shown = self._decode([token_id])
        return text

    def flush(self) -> str:
        self._last, self._shown = None, ""
        return ""
