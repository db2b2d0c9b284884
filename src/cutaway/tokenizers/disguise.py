"""Hiding control strings in what people wrote, so that no template can turn them into tokens.

One character of each is swapped for a stand-in, a private-use character found nowhere else in
the conversation. Lengths, trimming, searching and JSON come out as before; only the control
string is no longer there to be matched. After rendering, the stand-ins tell where to be careful.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from cutaway.errors import TemplateError

__all__ = ["ControlStrings", "Disguise", "plain"]

_PRIVATE = range(0xF0000, 0xFFFFE)  # Supplementary Private Use Area A
_DEEPEST = 100


@final
class ControlStrings:
    """Finds control strings, whole or begun or ended, in linear time."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._whole = {text for text in strings if len(text) > 1 and not text.isspace()}
        self._lengths: dict[str, list[int]] = {}
        for text in self._whole:
            self._lengths.setdefault(text[:2], []).append(len(text))
        for head, lengths in self._lengths.items():
            self._lengths[head] = sorted(set(lengths))
        self._heads = {text[:end] for text in self._whole for end in range(1, len(text))}
        self._tails = {text[start:] for text in self._whole for start in range(1, len(text))}
        self._all = "\0".join(self._whole)
        self._longest = max(map(len, self._whole), default=0)
        self.first_marks = {text[at] for text in self._whole if (at := _visible(text, 0, len(text))) >= 0}

    def places(self, text: str) -> set[int]:
        """Positions whose characters must go so that no control string can come of ``text``.

        That is in every whole one, and where the text ends in the beginning of one or begins with
        the end of one: a template may set the next text right beside it. Plain words do not count
        there, or the role ``user`` would be part of ``<|user|>``.
        """
        found = set()
        if self._whole:
            for first in {head[0] for head in self._lengths}:
                start = text.find(first)
                while start >= 0:
                    lengths = self._lengths.get(text[start : start + 2], ())
                    if any(text[start : start + length] in self._whole for length in lengths):
                        found.add(_visible(text, start, len(text)))
                    start = text.find(first, start + 1)
            for size in range(1, min(len(text), self._longest - 1) + 1):
                if text[-size:] in self._heads:
                    found.add(_visible(text, len(text) - size, len(text)))
                if text[:size] in self._tails:
                    found.add(_mark(text, 0, size))
            if text in self._all:
                found.add(_mark(text, 0, len(text)))
        return found - {-1}


def _visible(text: str, start: int, end: int) -> int:
    return next((i for i in range(start, end) if not text[i].isspace()), -1)


def _mark(text: str, start: int, end: int) -> int:
    return next((i for i in range(start, end) if not (text[i].isspace() or text[i].isalnum() or text[i] in "_-")), -1)


@final
class Disguise:
    """One conversation's stand-ins. ``inputs`` is everything people wrote, as `plain` gives it."""

    def __init__(self, control: ControlStrings, template: str, inputs: Any) -> None:
        self._control = control
        seen = {char for char in template if char >= "\U000f0000"}
        for text in _texts(inputs):
            if not text.isascii():
                seen.update(char for char in set(text) if char >= "\U000f0000")
        self._free = (char for char in map(chr, _PRIVATE) if char not in seen)
        self._stand_in: dict[str, str] = {}

    def hide(self, value: Any, every: bool = False) -> Any:
        """A copy of ``value`` with every string in it disguised.

        With ``every``, each character that some control string begins with, wherever it stands: then none can come
        of the text even if the template changes it on the way.
        """
        if isinstance(value, str):
            places = self._control.places(value)
            if every:
                places |= {i for i, char in enumerate(value) if char in self._control.first_marks}
            if not places:
                return value
            chars = list(value)
            for place in places:
                chars[place] = self._for(chars[place])
            return "".join(chars)
        if isinstance(value, dict):
            return {self.hide(key, every): self.hide(item, every) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item, every) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """The text as people wrote it."""
        return text.translate({ord(hidden): char for char, hidden in self._stand_in.items()})

    def worn(self, text: str) -> bool:
        """Is anything in the text disguised?"""
        return any(hidden in text for hidden in self._stand_in.values())

    def _for(self, char: str) -> str:
        if char not in self._stand_in:
            self._stand_in[char] = next(self._free)
        return self._stand_in[char]


def plain(value: Any, depth: int = 0) -> Any:
    """A copy of a JSON-like value made of Python's own types. TemplateError for anything else in it."""
    if depth > _DEEPEST:
        raise TemplateError("messages are nested too deeply", expected=f"at most {_DEEPEST} levels")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {plain(key, depth + 1): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    raise TemplateError("messages hold something that is not JSON", got=type(value).__name__)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
            yield from _texts(item)
