"""Colours of a terminal: blue above zero, purple below, each with letters that can be read on it."""

from __future__ import annotations

# From weak to strong. Middling in lightness, so that they stand out on a dark ground and on a light one.
UP = ("#93a8c4", "#72a0da", "#4a8fe4", "#2272dc", "#0f55bd")
DOWN = ("#b5a3c4", "#bb8fd6", "#b871dd", "#9d44c8", "#7c25a6")
DARK_LETTERS = 3  # of each: black on the weak ones, white on the strong


def painted(level: int) -> str:
    """The style of a strength, as rich spells it; none for 0.

    >>> painted(0), painted(-5)
    ('', '#ffffff on #7c25a6')
    """
    if not level:
        return ""
    place = abs(level) - 1
    return f"{'#000000' if place < DARK_LETTERS else '#ffffff'} on {(UP if level > 0 else DOWN)[place]}"
