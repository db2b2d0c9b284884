"""What both ways of drawing share: numbers in few letters, how strong a colour is, labels without what they share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from cutaway.inspection.figure import Scale
from cutaway.look import Look, visible

_SPELT = str.maketrans(
    {"“": '"', "”": '"', "−": "-", "–": "-", "×": "x", "…": "...", "→": "->", "∞": "inf", "’": "'", "·": "_"}
)
STEPS = 5  # strengths of a colour
FAINT = 0.04  # below this share of the strongest there is none


def span(values: Iterable[float | None], scale: Scale) -> tuple[float, float]:
    """The numbers that are not coloured at all, and most strongly."""
    if scale == "share":
        return 0.0, 1.0
    there = [value for value in values if value is not None and math.isfinite(value)]
    if scale == "signed":
        return 0.0, max(map(abs, there), default=0.0) or 1.0
    low, high = min(there, default=0.0), max(there, default=1.0)
    return (min(low, 0.0) if low < 0 else 0.0 if low < high / 2 else low), (high if high > low else low + 1.0)


def longest(values: Iterable[float], scale: Scale) -> float:
    """The number whose bar takes all the room."""
    most = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 1.0 if scale == "share" or not most else most


def strength(value: float | None, ends: tuple[float, float]) -> int:
    """How strong a colour is, from 0 to ``STEPS``; below zero of what is negative.

    >>> strength(0.5, (0.0, 1.0)), strength(-2.0, (0.0, 2.0)), strength(None, (0.0, 1.0))
    (3, -5, 0)
    """
    if value is None or math.isnan(value):
        return 0
    share = (value - ends[0]) / (ends[1] - ends[0])
    if abs(share) < FAINT:
        return 0
    level = min(math.ceil(min(abs(share), 1.0) * STEPS), STEPS)
    return level if share > 0 else -level


class Numbers:
    """Numbers of one figure in as few letters as tell them apart.

    Args:
        values: all of them; they have decimals in common.
        scale: what they are: shares have no sign and no 0 before the point, signed ones always a sign.
        minus: the sign of what is below zero.

    >>> say = Numbers([0.5, -12.25], "signed", "-")
    >>> say(0.5), say(-12.25), say(0.0), say(None)
    ('+0.5', '-12.2', '0', '')
    """

    def __init__(self, values: Iterable[float | None], scale: Scale, minus: str = "−") -> None:
        there = [value for value in values if value is not None and math.isfinite(value)]
        most = max(map(abs, there), default=0.0)
        self._scale, self._minus, self._most = scale, minus, most
        self._whole = all(value == int(value) for value in there) and scale == "plain"
        tiny = 0 < most < 0.01
        self._decimals = 0 if self._whole or most >= 100 else 1 if most >= 10 else 2 if most >= 0.1 else 3
        self._odd = tiny and scale != "share"

    def __call__(self, value: float | None) -> str:
        """One of them; nothing for none."""
        if value is None or math.isnan(value):
            return ""
        if math.isinf(value):
            return self._signed("∞" if self._minus == "−" else "inf", value)
        if self._scale == "share":
            text = f"{value:.2f}"
            return {"0.00": "0", "1.00": "1"}.get(text, text.removeprefix("0"))
        if self._odd or (abs(value) >= 10_000):
            return self._signed(_short(abs(value)), value)
        text = f"{abs(value):.{self._decimals}f}"
        return "0" if float(text) == 0 else self._signed(text, value)

    def tells(self, value: float) -> bool:
        """Whether a number that is not zero does not look like it."""
        return self._odd or float(f"{abs(value):.{self._decimals}f}") != 0

    def _signed(self, text: str, value: float) -> str:
        return f"{self._minus}{text}" if value < 0 else f"+{text}" if self._scale == "signed" else text


def _short(value: float) -> str:
    """
    >>> _short(12_345), _short(0.00123)
    ('12k', '1.2e-3')
    """
    if value >= 10_000:
        for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if value >= size:
                return f"{value / size:.0f}{unit}"
    if value == 0:
        return "0"
    head, _, power = f"{value:.1e}".partition("e")
    return f"{head}e{int(power)}"


def number(value: float) -> str:
    """A number by itself, to four digits.

    >>> number(12345.678), number(0.00001234), number(2.0)
    ('12,346', '1.234e-05', '2')
    """
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 and math.isfinite(value) else f"{value:.4g}"


def shared(labels: Sequence[str]) -> tuple[list[str], str]:
    """Labels without the dotted parts that all of them begin and end with, and what they were, with a star.

    >>> shared(["decoder.layers.0.attn", "decoder.layers.1.attn"])
    (['0', '1'], 'decoder.layers.*.attn')
    """
    parts = [label.split(".") for label in labels]
    least = min(map(len, parts), default=0) - 1
    if len(parts) < 2 or least < 1 or len({*labels}) < len(labels):
        return list(labels), ""
    head = next((i for i in range(least) if len({tuple(part[: i + 1]) for part in parts}) > 1), least)
    most = least - head
    tail = next((i for i in range(most) if len({tuple(part[len(part) - i - 1 :]) for part in parts}) > 1), most)
    if not head + tail:
        return list(labels), ""
    first = parts[0]
    said = ".".join([*first[:head], "*", *(first[len(first) - tail :] if tail else [])])
    return [".".join(part[head : len(part) - tail]) for part in parts], said


def clean(text: str, look: Look) -> str:
    """A text that a terminal can take, with what is invisible shown; our own signs spelt where there is only ASCII."""
    return visible(text.translate(_SPELT) if look.plain else text, look)


def in_column(cells: Sequence[str | int | float], look: Look) -> list[str]:
    """The cells of a column of a table; numbers with decimals in common, where that tells them apart."""
    there = [abs(cell) for cell in cells if not isinstance(cell, str) and cell and math.isfinite(cell)]
    there = [value for value in there if value > 1e-7 * max(there)]  # less is rounding, beside the others
    say = Numbers([float(cell) for cell in cells if not isinstance(cell, str)], "plain", "-" if look.plain else "−")
    if all(isinstance(cell, float) for cell in cells) and there and say.tells(min(there)):
        return [say(float(cell)) or "-" for cell in cells]
    minus = "-" if look.plain else "−"
    return [clean(cell, look) if isinstance(cell, str) else number(cell).replace("-", minus) for cell in cells]
