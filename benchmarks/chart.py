"""A chart of a few lines as SVG: both axes logarithmic, measured points with their spread, predictions dashed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 560, 300, 64, 34, 16, 44
COLOURS = ("#1f5fa8", "#b3541e", "#2d7a4b")
Point = tuple[float, float, float, float]  # x, then median, least and most


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, within."""
    found = [
        m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)
    ]
    return [x for x in found if low <= x * 1.0001 and x <= high * 1.0001]


def chart(
    title: str,
    x_says: str,
    y_says: str,
    measured: Mapping[str, Sequence[Point]],
    predicted: Mapping[str, Sequence[Point]],
) -> str:
    """The picture. Lines of one name have one colour."""
    points = [p for line in (*measured.values(), *predicted.values()) for p in line]
    xs = [p[0] for p in points]
    low, high = min(p[2] for p in points) * 0.8, max(p[3] for p in points) * 1.25
    wide, tall = math.log(max(xs) / min(xs)) or 1, math.log(high / low)

    def at(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / min(xs)) / wide
        return round(right, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(y / low) / tall, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13" font-weight="bold">{title}</text>',
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_says}</text>',
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">{y_says}</text>',
    ]
    for y in ticks(low, high):
        _, up = at(xs[0], y)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up}" y2="{up}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up + 4}" text-anchor="end">{y:,.4g}</text>')
    for x in sorted(set(xs)):
        right, _ = at(x, low)
        parts.append(f'<text x="{right}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:,.0f}</text>')
    for colour, name in zip(COLOURS, measured, strict=False):
        for line, style in ((predicted.get(name, ()), ' stroke-dasharray="5 4"'), (measured[name], "")):
            path = " ".join("{},{}".format(*at(p[0], p[1])) for p in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{style}/>')
        for x, y, least, most in measured[name]:
            (right, up), (_, lowest), (_, highest) = at(x, y), at(x, least), at(x, most)
            parts.append(f'<circle cx="{right}" cy="{up}" r="2.6" fill="{colour}"/>')
            parts.append(f'<line x1="{right}" x2="{right}" y1="{lowest}" y2="{highest}" stroke="{colour}"/>')
    for i, (colour, name) in enumerate(zip(COLOURS, measured, strict=False)):
        says = f"{name} (dashed: the floor)"
        parts.append(f'<text x="{LEFT + 10}" y="{TOP + 12 + 14 * i}" fill="{colour}">{says}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
