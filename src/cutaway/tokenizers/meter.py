"""What one rendering of a chat template may use: steps, time, text, and the size of values."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final, final

from jinja2.utils import Namespace

from cutaway.errors import TemplateError

__all__ = ["MIB", "Meter"]

FUEL = 1_000_000
SECONDS = 1.0
MIB = 1 << 20
_DEEPEST = 100


@final
class Meter:
    """What one rendering may use; ``context`` is how many characters it was given."""

    def __init__(self, context: int, *, fuel: int = FUEL, seconds: float = SECONDS) -> None:
        self._fuel = fuel
        self._until = time.monotonic() + seconds
        self.longest: Final = min(8 * MIB, 64 * 1024 + 8 * context)  # of the output, and of any text on the way
        self._chars = 32 * MIB + 64 * context  # of all texts ever made
        self._heaviest = 4 * MIB + 4 * context
        self._weights: dict[int, tuple[object, int]] = {}

    def spend(self, chars: int = 0) -> None:
        """Pay one step, and ``chars`` characters made."""
        self._fuel -= 1
        self._chars -= chars
        if self._fuel < 0:
            raise TemplateError("template takes too many steps", expected=f"at most {FUEL}")
        if self._chars < 0:
            raise TemplateError("template makes too much text")
        if time.monotonic() > self._until:
            raise TemplateError("template takes too long", expected=f"at most {SECONDS:g} s")

    def allow(self, length: float) -> None:
        """Refuse a text or list of this length before it is made."""
        if length > self.longest:
            raise TemplateError("template makes too long a text", expected=f"at most {self.longest}")

    def kept(self, value: Any) -> Any:
        """Pay for a value that was just made, and give it back."""
        if isinstance(value, str | bytes):
            self.allow(len(value))
            self.spend(len(value))
        elif isinstance(value, list | tuple | dict):
            self.weigh(value)
        elif isinstance(value, int) and value.bit_length() > 4096:
            raise TemplateError("template makes too large a number")
        return value

    def weigh(self, value: Any, depth: int = 0) -> int:
        """Characters that a value would be as text, counting shared parts each time they show.

        A list of two of the same list, forty times over, is small in memory and endless as text.
        """
        if isinstance(value, str | bytes):
            return len(value) + 1
        if isinstance(value, Namespace):
            raise TemplateError("template puts a namespace into a value")
        if not isinstance(value, list | tuple | dict):
            return 8
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        if depth > _DEEPEST:
            raise TemplateError("values are nested too deeply", expected=f"at most {_DEEPEST} levels")
        parts: Iterable[Any] = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        weight = 2
        for part in parts:
            weight += self.weigh(part, depth + 1)
            if weight > self._heaviest:
                raise TemplateError("template makes too large a value")
        self._weights[id(value)] = (value, weight)  # holding it, so that its id stays its own
        return weight
