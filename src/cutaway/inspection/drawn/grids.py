"""A grid in a terminal: as many columns as fit, the others in bands below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutaway.inspection.drawn.hues import painted
from cutaway.inspection.drawn.words import Numbers, clean, shared, span, strength
from cutaway.inspection.figure import Grid
from cutaway.look import Look, cut, width

if TYPE_CHECKING:
    from rich.text import Text

MOST_ROWS, MOST_BANDS = 100, 4  # beyond these only --json, or as_dict, has all
LEAST_WORD, MOST_WORD = 4, 12  # columns of a word in a cell, without its number
LABEL = 24


@dataclass(frozen=True, slots=True)
class _Cells:
    """What stands in every cell, and how strongly each is coloured."""

    words: list[list[str]]
    numbers: list[list[str]]
    levels: list[list[int]]


def grid(part: Grid, look: Look) -> Iterator[Text]:
    """A grid, line by line."""
    from rich.text import Text

    rows, said = shared(part.rows)
    axes = f"{part.down} by {part.across}" if part.down and part.across else part.across or part.down
    head = Text(cut(clean(part.title, look), look.width, look), "bold")
    if axes and axes not in part.title and width(head.plain) + 2 + width(axes) <= look.width:
        head.append(f"  {axes}", "not bold dim")
    yield head
    if said:
        yield Text(cut(f"{part.down or 'row'} *: {said}", look.width, look), "dim")
    labels = [cut(clean(row, look), LABEL, look) for row in rows]
    left = max([*map(width, labels), 0])
    cells = _cells(part, look)
    columns = [clean(column, look) for column in part.columns]
    count = len(columns)
    shown = min(len(rows), MOST_ROWS)
    bands = list(_bands(cells, columns, look.width - left - 1, look))
    for first, sizes in bands[:MOST_BANDS]:
        last = first + len(sizes)
        line = Text(" " * (left + 1))
        for i, size in zip(range(first, last), sizes, strict=True):
            name = cut(columns[i], size, look)
            line.append((name + " " * (size - width(name)) if part.texts else " " * (size - width(name)) + name), "dim")
            line.append(" ")
        line.rstrip()
        yield line
        for row in range(shown):
            yield _row(cells, row, range(first, last), sizes, labels[row], left, look)
        if last < count and first != bands[:MOST_BANDS][-1][0]:
            yield Text("")
    there = sum(len(sizes) for _, sizes in bands[:MOST_BANDS])
    if there < count or shown < len(rows):
        yield Text(f"The first {shown} of {len(rows)} rows and {there} of {count} columns.", "dim italic")


def _cells(part: Grid, look: Look) -> _Cells:
    flat = [value for row in part.values for value in row]
    say, ends = Numbers(flat, part.scale, "-" if look.plain else "−"), span(flat, part.scale)
    numbers = [[say(value) for value in row] for row in part.values]
    words = [[clean(text, look) for text in row] for row in part.texts] if part.texts else []
    return _Cells(words, numbers, [[strength(value, ends) for value in row] for row in part.values])


def _bands(cells: _Cells, columns: list[str], room: int, look: Look) -> Iterator[tuple[int, list[int]]]:
    """Which columns stand beside one another, as the first and the width of each."""
    sizes = []
    for i, name in enumerate(columns):
        number = max((width(row[i]) for row in cells.numbers), default=0)
        if cells.words:
            word = max((width(row[i]) for row in cells.words), default=0)
            sizes.append(max(min(max(word, LEAST_WORD), MOST_WORD) + 1 + number, 3))
        else:
            sizes.append(max(number, min(width(name), 8 if number < 8 else number), 1))
    total = sum(sizes) + len(sizes)
    if cells.words and total > room and sizes:  # shorter words, if then all stand in one line
        least = [max(size - MOST_WORD + LEAST_WORD, min(size, LEAST_WORD + 5)) for size in sizes]
        spare = room - sum(least) - len(least)
        if spare >= 0:
            gain = spare // len(sizes)
            sizes = [min(size, low + gain) for size, low in zip(sizes, least, strict=True)]
    elif total > room and sizes:  # shorter names of columns
        least = [max((width(row[i]) for row in cells.numbers), default=1) for i in range(len(sizes))]
        sizes = [max(low, min(size, 3)) for size, low in zip(sizes, least, strict=True)]
    first, used = 0, 0
    for i, size in enumerate(sizes):
        if used and used + 1 + size > room:
            yield first, sizes[first:i]
            first, used = i, 0
        used += size + 1
    if sizes:
        yield first, sizes[first:]


def _row(cells: _Cells, row: int, columns: range, sizes: list[int], label: str, left: int, look: Look) -> Text:
    from rich.text import Text

    line = Text(label + " " * (left - width(label) + 1), "dim")
    for i, size in zip(columns, sizes, strict=True):
        number = cells.numbers[row][i]
        if cells.words:
            word = cut(cells.words[row][i], max(size - width(number) - 1, 1), look)
            text = word + " " * (size - width(word) - width(number)) + number
        else:
            text = cut(number, size, look).rjust(size)
        line.append(text, f"not dim {painted(cells.levels[row][i])}".strip())
        line.append(" ")
    line.rstrip()
    return line
