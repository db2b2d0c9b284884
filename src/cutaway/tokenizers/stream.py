"""Text as its tokens arrive: whole characters only, and together exactly the whole decode."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import final

__all__ = ["ByteStream", "DecodeStream", "WordStream"]


@final
class DecodeStream:
    """Turns ids into finished characters. ``"".join(pushes) + flush()`` is ``decode(ids)``.

    A character that spans tokens is held back until it is complete; UTF-8's longest has four
    bytes, so at most three tokens wait. Bytes that can no longer become a character are U+FFFD.
    """

    def __init__(self, take: ByteStream | WordStream) -> None:
        self._take = take

    def push(self, token_id: int) -> str:
        """The text that this id finishes; often a word, sometimes nothing."""
        return self._take.push(token_id)

    def flush(self) -> str:
        """What was still held back, at the end. The stream then starts anew."""
        return self._take.flush()


@final
class ByteStream:
    """For vocabularies whose tokens are bytes. ``spell`` gives them, None to skip the token."""

    def __init__(self, spell: Callable[[int], bytes | None], *, strip: bool) -> None:
        self._spell = spell
        self._strip = self._at_start = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        data = self._spell(token_id)
        return self._emit(self._utf8.decode(data)) if data else ""

    def flush(self) -> str:
        text = self._emit(self._utf8.decode(b"", True))
        self._utf8.reset()
        self._at_start = self._strip
        return text

    def _emit(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


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
