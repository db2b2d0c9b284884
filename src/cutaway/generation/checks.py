"""Checking one argument of a call."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral

from cutaway.errors import RequestError

HUGE = 1.7976931348623157e308  # the largest float


def shown(value: object) -> object:
    """A value as an error should show it: a text that is no number with its quotes."""
    return repr(value) if isinstance(value, str) else value


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """A whole number in range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        wanted = f"an int ≥ {low}" if high is None else f"an int in {low}…{high}"
        raise RequestError("not a whole number in range", field=name, expected=wanted, got=shown(value))
    return value


def flag(name: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise RequestError("not true or false", field=name, expected="True or False", got=shown(value))
    return value


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number in range."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    # A whole number too large for a float is as little use as infinity, and NaN is in no range.
    if not fits or not -HUGE <= value <= HUGE:  # type: ignore[operator]
        wanted = (
            "a number" if math.isinf(low) else f"a number ≥ {low}" if high == math.inf else f"a number in {low}…{high}"
        )
        raise RequestError("not a number in range", field=name, expected=wanted, got=shown(value))
    return float(value)  # type: ignore[arg-type]


def tokens(name: str, ids: list[object], vocab_size: int) -> list[int]:
    """Ids of the vocabulary, or none."""
    return check_ids(ids, vocab_size, name) if ids else []


def check_ids(ids: Iterable[object], vocab_size: int, field: str = "prompt") -> list[int]:
    """Token ids, if they are usable.

    Raises:
        RequestError: none, or one outside the vocabulary.
    """
    if not isinstance(ids, Iterable):
        raise RequestError("not the ids of a text", field=field, expected="a list of ints", got=shown(ids))
    found = list(ids)
    if not found:
        raise RequestError("there are no tokens", field=field, expected="at least one")
    for place, token in enumerate(found):
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise RequestError(
                "not a token of this vocabulary",
                field=f"{field}/{place}",
                expected=f"0…{vocab_size - 1}",
                got=shown(token),
                hint="One text at a time is read here, or the ids of one." if isinstance(token, str) else None,
            )
    return [int(token) for token in found]  # type: ignore[call-overload]
