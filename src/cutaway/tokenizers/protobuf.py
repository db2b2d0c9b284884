"""Protocol Buffers' wire format, as far as a file of settings and strings needs it.

A message is a row of fields; each has a number, a wire type and a value. Nothing here knows what the fields mean.
Messages inside messages come back as spans of the file, so there is no recursion.
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

from cutaway.errors import LimitExceeded, TokenizerError

__all__ = ["Entry", "Reader", "Span"]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_NAMES = {VARINT: "a whole number", FIXED64: "eight bytes", BYTES: "a length with its bytes", FIXED32: "four bytes"}


class Span(NamedTuple):
    """Where bytes lie in the file."""

    start: int
    end: int


class Entry(NamedTuple):
    """One field: its number, how it is stored, its value (a number if stored as `VARINT`), and where it begins."""

    number: int
    wire: int
    value: int | Span
    at: int


@final
@dataclass(frozen=True)
class Reader:
    """A file's bytes.

    Errors: TokenizerError with the byte offset where a field ends early, is stored in an unknown way or in another
    than was asked for; LimitExceeded past a length asked for.
    """

    data: bytes
    path: str

    def entries(self, span: Span) -> Iterator[Entry]:
        """The fields of the message that fills ``span``, in the file's order."""
        at = span.start
        while at < span.end:
            begin = at
            key, at = self._varint(at, span.end)
            number, wire = key >> 3, key & 7
            if not 0 < number < 1 << 29:
                raise self.error("no such field number", begin, got=number)
            if wire == VARINT:
                value, at = self._varint(at, span.end)
                yield Entry(number, wire, value, begin)
                continue
            if wire == BYTES:
                size, at = self._varint(at, span.end)
            elif wire in (FIXED32, FIXED64):
                size = 4 if wire == FIXED32 else 8
            else:  # groups, which nobody writes any more, and 6 and 7
                raise self.error("unknown wire type", begin, expected="0, 1, 2 or 5", got=wire)
            if size > span.end - at:
                raise self.error("ends early", begin, expected=f"{size} bytes", got=span.end - at)
            yield Entry(number, wire, Span(at, at + size), begin)
            at += size

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for i in range(10):
            if at + i >= end:
                raise self.error("number ends early", at)
            byte = self.data[at + i]
            value |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                if value >> 64:
                    break
                return value, at + i + 1
        raise self.error("number has more than 64 bits", at)

    # -- values

    def span(self, entry: Entry, field: str) -> Span:
        """Where a text or an inner message lies."""
        if not isinstance(entry.value, Span) or entry.wire != BYTES:
            raise self._stored(entry, field, BYTES)
        return entry.value

    def bytes(self, entry: Entry, field: str, most: int) -> bytes:
        start, end = self.span(entry, field)
        if end - start > most:
            what = "is too long"
            raise LimitExceeded(
                what, path=self.path, field=field, offset=start, expected=f"at most {most} bytes", got=end - start
            )
        return self.data[start:end]

    def text(self, entry: Entry, field: str, most: int) -> str:
        data = self.bytes(entry, field, most)
        try:
            return data.decode()
        except UnicodeDecodeError as bad:
            raise self.error("is not UTF-8", self.span(entry, field).start + bad.start, field=field) from bad

    def whole(self, entry: Entry, field: str) -> int:
        """A number of Protocol Buffers' type int32."""
        if not isinstance(entry.value, int) or entry.wire != VARINT:
            raise self._stored(entry, field, VARINT)
        value = entry.value - (1 << 64) if entry.value >> 63 else entry.value
        if not -(1 << 31) <= value < 1 << 31:
            raise self.error("has more than 32 bits", entry.at, field=field, got=value)
        return value

    def flag(self, entry: Entry, field: str) -> bool:
        value = self.whole(entry, field)
        if value not in (0, 1):
            raise self.error("is not a flag", entry.at, field=field, expected="0 or 1", got=value)
        return value == 1

    def real(self, entry: Entry, field: str) -> float:
        """A number of Protocol Buffers' type float."""
        if not isinstance(entry.value, Span) or entry.wire != FIXED32:
            raise self._stored(entry, field, FIXED32)
        (value,) = struct.unpack_from("<f", self.data, entry.value.start)
        return float(value)

    def _stored(self, entry: Entry, field: str, wanted: int) -> TokenizerError:
        what = "is stored in another way"
        return self.error(what, entry.at, field=field, expected=_NAMES[wanted], got=_NAMES[entry.wire])

    def error(
        self, what: str, at: int, *, field: str | None = None, expected: object = None, got: object = None
    ) -> TokenizerError:
        return TokenizerError(what, path=self.path, field=field, offset=at, expected=expected, got=got)
