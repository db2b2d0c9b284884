"""SentencePiece's table of characters, read as SentencePiece reads it: the longest entry at each place wins.

The library's `Precompiled` looks at grapheme clusters instead and takes the shortest entry, so that a mark is lost from
``e`` + dot below + circumflex. It stands in T5's published tokenizer.json, whose ids must be its own; Marian's are
SentencePiece's.

The table is a trie in a double array (Yata's darts-clone) before the replacements, which end with a zero byte.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable
from typing import final

from cutaway.errors import TokenizerError

__all__ = ["Charsmap", "Prepared"]

_LONGEST_KEY = 64  # bytes; the longest of SentencePiece's own has 12
_LONGEST_TEXT = 256  # bytes; the longest of SentencePiece's own has 33


@final
class Prepared:
    """A normalized text, and for each of its characters the stretch of the text that it came from."""

    def __init__(self, text: str, starts: list[int] | None = None, ends: list[int] | None = None) -> None:
        self.text = text
        self._starts, self._ends = starts, ends

    def place(self, start: int, end: int) -> tuple[int, int]:
        """Where ``text[start:end]`` was."""
        if self._starts is None or self._ends is None:
            return start, end
        if start >= len(self._starts):
            at = self._ends[-1] if self._ends else 0
            return at, at
        first = self._starts[start]
        return first, self._ends[end - 1] if end > start else first


@final
class Charsmap:
    """The table. Empty bytes change nothing.

    Args:
        data: ``precompiled_charsmap``.
        keep: strings that stay as they are.

    Errors: TokenizerError if its parts do not fit together.
    """

    def __init__(self, data: bytes, *, keep: Iterable[str] = (), path: str | None = None) -> None:
        size = int.from_bytes(data[:4], "little")
        if data and (size % 4 or not 0 < size <= len(data) - 4):
            what = "ends before what it announces"
            raise TokenizerError(what, path=path, field="normalizer_spec.precompiled_charsmap", got=len(data))
        self._units = array("I", data[4 : 4 + size])
        if sys.byteorder == "big":
            self._units.byteswap()
        self._texts = data[4 + size :]
        longest = max(map(len, self._texts.split(b"\0")))
        if longest > _LONGEST_TEXT:
            most = f"at most {_LONGEST_TEXT} bytes"
            field = "normalizer_spec.precompiled_charsmap"
            raise TokenizerError("makes a character too long", path=path, field=field, expected=most, got=longest)
        names = sorted(keep, key=len, reverse=True)
        self._keep = re.compile("|".join(map(re.escape, names))) if names else None
        # Most tables have nothing that begins with two printable ASCII characters, and texts are mostly those.
        self._stills: dict[str, bool] = {}
        printable = [chr(code).encode() for code in range(0x20, 0x7F)]
        double = bool(data) and any(
            (found := self._walk(a)) and (found[1] or any(self._walk(a + b) for b in printable)) for a in printable
        )
        self._inert = None if double else re.compile(r"[ -~]+(?![^ -~])|[ -~]+(?=[ -~])")

    def prepare(self, text: str) -> Prepared:
        """The text with every entry replaced."""
        if not self._units or (self._inert and text.isascii() and text.isprintable()):
            return Prepared(text)
        out: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        kept = {found.start(): found.end() for found in self._keep.finditer(text)} if self._keep else {}
        data = text.encode()
        at = place = size = 0  # in characters, in bytes
        while at < len(text):
            run = self._inert.match(text, at) if self._inert and not kept else None
            char = text[at]
            if run or at in kept or self._still(char):
                new = None
            else:
                size, new = self._longest(data, place)
            if new is None:
                end = run.end() if run else kept.get(at, at + 1)
                new = text[at:end]
                out.append(new)
                starts += range(at, end)
                ends += range(at + 1, end + 1)
                place += len(new.encode())
            else:
                end = at + len(data[place : place + size].decode("utf-8", "replace"))
                out.append(new)
                starts += [at] * len(new)
                ends += [end] * len(new)
                place += size
            at = end
        return Prepared("".join(out), starts, ends)

    def _still(self, char: str) -> bool:
        """Does no entry begin with this character? Remembered, as texts have few different ones."""
        known = self._stills.get(char)
        if known is None:
            known = self._stills[char] = self._walk(char.encode()) is None
        return known

    def _walk(self, key: bytes) -> tuple[int, bool] | None:
        """The node behind these bytes, and whether they are an entry; None if no entry begins with them."""
        units = self._units
        node, leaf = _offset(units[0]), False
        for byte in key:
            node ^= byte
            if node >= len(units) or units[node] & 0x800000FF != byte:
                return None
            leaf = bool(units[node] >> 8 & 1)
            node ^= _offset(units[node])
        return node, leaf

    def _longest(self, data: bytes, start: int) -> tuple[int, str | None]:
        """How many bytes the longest entry has that ``data`` continues with, and what is put for it."""
        units, size, found = self._units, 0, -1
        node = _offset(units[0])
        for i in range(start, min(len(data), start + _LONGEST_KEY)):
            node ^= data[i]
            if node >= len(units):
                break
            unit = units[node]
            if unit & 0x800000FF != data[i]:
                break
            node ^= _offset(unit)
            # An entry ends between characters, whatever a damaged table says.
            if unit >> 8 & 1 and node < len(units) and (i + 1 == len(data) or data[i + 1] & 0xC0 != 0x80):
                size, found = i + 1 - start, units[node] & 0x7FFFFFFF
        if found < 0:
            return 0, None
        end = self._texts.find(b"\0", found)
        return size, self._texts[found : len(self._texts) if end < 0 else end].decode("utf-8", "replace")


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 1 << 9) >> 6)
