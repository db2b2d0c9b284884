"""The typed key/value metadata at the head of a GGUF file.

::

    key    u64 length, UTF-8
    type   u32: u8 i8 u16 i16 u32 i32 f32 bool str arr u64 i64 f64
    value  a number; a string (u64 length, UTF-8); or an array (u32 type, u64 count, values)

Each size is checked against the file before anything is allocated or looped over, and what the
values take in memory against the file's size plus a constant.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import struct
from sys import getsizeof
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from cutaway.errors import FormatError, LimitExceeded, StorageError, TruncatedError
from cutaway.formats.files import read_into

__all__ = ["Cursor", "GgufValue", "read_metadata"]

GgufValue: TypeAlias = "bool | int | float | str | list[str] | npt.NDArray[Any]"

MAX_KEY = 65_535  # bytes
MAX_STRING = 12 << 20  # bytes of a string that stands alone
MAX_ITEM = 1 << 20  # bytes of a string in an array
_READ = 1 << 20  # bytes fetched at a time
_SPARE = 48 << 20  # bytes that the metadata may take in memory beyond the size of the file
_BOOL, _STR, _ARR = 7, 8, 9
_NUMBERS = {
    0: ("u8", "B"),
    1: ("i8", "b"),
    2: ("u16", "H"),
    3: ("i16", "h"),
    4: ("u32", "I"),
    5: ("i32", "i"),
    6: ("f32", "f"),
    _BOOL: ("bool", "B"),
    10: ("u64", "Q"),
    11: ("i64", "q"),
    12: ("f64", "d"),
}
_LENGTH = struct.Struct("<Q")
_EMPTY = getsizeof("") + 8  # bytes that a string and its place in a list take at least


class Cursor:
    """A place in a file of known size, read in order, a megabyte at a time."""

    def __init__(self, file: BinaryIO, size: int, path: str) -> None:
        self.size = size
        self.path = path
        self._file = file
        self._base = 0  # where the buffer starts in the file
        self._buffer = b""
        self._at = 0
        self._allowance = size + _SPARE

    @property
    def offset(self) -> int:
        return self._base + self._at

    @property
    def left(self) -> int:
        return self.size - self.offset

    def spend(self, nbytes: int, field: str) -> None:
        """Count memory. LimitExceeded when metadata would take far more of it than the file has bytes."""
        self._allowance -= nbytes
        if self._allowance < 0:
            most = f"at most {self.size + _SPARE} bytes"
            raise LimitExceeded("metadata takes too much memory", path=self.path, field=field, expected=most)

    def number(self, kind: str, field: str) -> Any:
        """One number of a `struct` kind. TruncatedError at the end of the file."""
        size = struct.calcsize(kind)
        self._need(size, field)
        (value,) = struct.unpack_from("<" + kind, self._buffer, self._at)
        self._at += size
        return value

    def text(self, limit: int, field: str) -> str:
        """A string. Errors: LimitExceeded, TruncatedError, and FormatError where it is not UTF-8."""
        start = self.offset
        length = self.number("Q", field)
        self._bound(length, limit, field, start)
        self.spend(length, field)
        self._need(length, field)
        data = memoryview(self._buffer)[self._at : self._at + length]  # a copy would count where strings are large
        self._at += length
        with contextlib.suppress(UnicodeDecodeError):
            return str(data, "ascii")
        self.spend(4 * length, field)  # one wide character makes all wide, and decoding overshoots by a quarter
        return _decode(data, self.path, field, start)

    def numbers(self, kind: str, count: int, field: str) -> npt.NDArray[Any]:
        """``count`` numbers, which the caller has checked to lie inside the file."""
        raw = np.empty(count * struct.calcsize(kind), np.uint8)
        read_into(self._file, self.offset, raw, path=self.path, field=field)
        self._base, self._buffer, self._at = self.offset + raw.nbytes, b"", 0
        return raw.view("<" + kind)

    def strings(self, count: int, field: str) -> list[str]:
        """``count`` strings, which the caller has checked to have room inside the file.

        A vocabulary is a quarter of a million of them, hence the bare loop.
        """
        texts: list[str] = []
        buffer, at, end = self._buffer, self._at, len(self._buffer)
        length_at, spent = _LENGTH.unpack_from, 0
        self.spend(_EMPTY * count, field)
        for i in range(count):
            stop = at + 8
            if stop <= end:
                stop += length_at(buffer, at)[0]
            if stop > end:  # the string is not whole in the buffer, or even its length is not
                spent = self._spend_on(texts, spent, field)
                self._at = at
                item = f"{field}[{i}]"
                self._need(8, item)
                length = length_at(self._buffer, self._at)[0]
                self._bound(length, MAX_ITEM, item, self.offset)
                self._need(8 + length, item)
                buffer, at, end = self._buffer, self._at, len(self._buffer)
                stop = at + 8 + length
            try:
                text = buffer[at + 8 : stop].decode()
            except UnicodeDecodeError:
                text = _decode(buffer[at + 8 : stop], self.path, f"{field}[{i}]", self._base + at)
            texts.append(text)
            at = stop
        self._at = at
        self._spend_on(texts, spent, field)
        return texts

    def _spend_on(self, texts: list[str], done: int, field: str) -> int:
        """Count what these take beyond what the least of them would, from one on; and how many there are."""
        self.spend(sum(map(getsizeof, texts[done:])) - (_EMPTY - 8) * (len(texts) - done), field)
        return len(texts)

    def _bound(self, length: int, limit: int, field: str, start: int) -> None:
        if length > self.left:
            raise TruncatedError(
                "string is longer than the file", path=self.path, field=field, offset=start, got=f"{length} bytes"
            )
        if length > limit:
            most = f"at most {limit} bytes"
            raise LimitExceeded(
                "string is too long", path=self.path, field=field, offset=start, expected=most, got=length
            )

    def _need(self, nbytes: int, field: str) -> None:
        """Have the next ``nbytes`` in the buffer."""
        rest = len(self._buffer) - self._at
        if nbytes <= rest:
            return
        if nbytes <= self.left:
            try:
                self._file.seek(self._base + len(self._buffer))
                more = self._file.read(max(nbytes - rest, _READ))
            except OSError as error:
                raise StorageError("cannot be read", path=self.path, got=error.strerror) from error
            self._base, self._buffer, self._at = self.offset, self._buffer[self._at :] + more, 0
        if nbytes > len(self._buffer) - self._at:
            raise TruncatedError(
                "ends early", path=self.path, field=field, offset=self.offset, got=f"{self.size} bytes"
            )


def _decode(data: bytes | memoryview, path: str, field: str, start: int) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("string is not UTF-8", path=path, field=field, offset=start + 8 + error.start) from error


def read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, GgufValue], dict[str, str]]:
    """``count`` keys: their values, and their declared types (``"u32"``, ``"str"``, ``"arr[f32]"``).

    Arrays of strings become lists, arrays of numbers numpy arrays of the declared width.
    Errors: FormatError, LimitExceeded and TruncatedError, each with the key.
    """
    values: dict[str, GgufValue] = {}
    types: dict[str, str] = {}
    for i in range(count):
        start = cursor.offset
        key = cursor.text(MAX_KEY, f"key {i}")
        if not key or not key.isprintable():
            raise FormatError("key is empty or unprintable", path=cursor.path, field=f"key {i}", offset=start, got=key)
        if key in values:
            raise FormatError("key stands twice", path=cursor.path, field=key, offset=start)
        cursor.spend(200, key)
        code = cursor.number("I", key)
        if code == _ARR:
            types[key], values[key] = _array(cursor, key)
        elif code == _STR:
            types[key], values[key] = "str", cursor.text(MAX_STRING, key)
        else:
            name, kind = _number_type(cursor, key, code)
            value = cursor.number(kind, key)
            if code == _BOOL and value > 1:
                raise FormatError("boolean is neither 0 nor 1", path=cursor.path, field=key, got=value)
            types[key], values[key] = name, bool(value) if code == _BOOL else value
    return values, types


def _array(cursor: Cursor, key: str) -> tuple[str, GgufValue]:
    code, count = cursor.number("I", key), cursor.number("Q", key)
    if code == _ARR:
        raise FormatError("array of arrays", path=cursor.path, field=key, expected="numbers or strings")
    name, kind = ("str", "Q") if code == _STR else _number_type(cursor, key, code)
    if count * struct.calcsize(kind) > cursor.left:
        most = f"at most {cursor.left} bytes"
        raise LimitExceeded("array is longer than the file", path=cursor.path, field=key, expected=most, got=count)
    if code == _STR:
        return "arr[str]", cursor.strings(count, key)
    values = cursor.numbers(kind, count, key)
    if code == _BOOL:
        if (values > 1).any():
            raise FormatError("boolean is neither 0 nor 1", path=cursor.path, field=key)
        values = values.view(np.bool_)
    return f"arr[{name}]", values


def _number_type(cursor: Cursor, key: str, code: int) -> tuple[str, str]:
    if code not in _NUMBERS:
        raise FormatError("value has an unknown type", path=cursor.path, field=key, expected="0 to 12", got=code)
    return _NUMBERS[code]
