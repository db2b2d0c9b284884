"""A figure in a terminal: coloured cells with their numbers, bars, words and tables, in as many columns as there are.

Colour is never alone: beside it stands a number or a sign, so that nothing is lost where there is none.
"""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutaway.inspection.drawn.grids import grid
from cutaway.inspection.drawn.hues import painted
from cutaway.inspection.drawn.words import Numbers, clean, in_column, longest, shared, span, strength
from cutaway.inspection.figure import Bars, Figure, Grid, Part, Rows, Words
from cutaway.look import Cell, Look, bar, cut, table, width

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure as rich draws things.

    Attributes:
        figure: what is drawn.
        look: what the place can show; by default what the console says of itself.
    """

    figure: Figure
    look: Look | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        look = self.look or Look(options.max_width, True, options.ascii_only)
        yield from lines(self.figure, look)


def lines(figure: Figure, look: Look) -> Iterator[Text]:
    """A figure, line by line."""
    from rich.text import Text

    for line in textwrap.wrap(clean(figure.title, look), look.width) or [""]:
        yield Text(line, "bold")
    for part in figure.parts:
        yield styled("", look)
        for drawn in _part(part, look):
            drawn.truncate(look.width)  # where there is no room for anything
            yield drawn
    if figure.notes:
        yield styled("", look)
    for note in figure.notes:
        mark = "* " if look.plain else "· "
        for line in textwrap.wrap(clean(note, look), look.width, initial_indent=mark, subsequent_indent="  "):
            yield Text(line, "dim")


def text_of(figure: Figure, look: Look) -> str:
    """The same as one text, with escape sequences where the look has colour."""
    from rich.console import Console

    out = io.StringIO()
    # What colours there are is the terminal's to say; whether there are any, the look's.
    system = "auto" if look.colour else None
    console = Console(file=out, width=look.width, force_terminal=look.colour, color_system=system, legacy_windows=False)  # type: ignore[arg-type]
    for line in lines(figure, look):
        console.print(line, highlight=False, soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def plain_text(figure: Figure) -> str:
    """The same for ``print``: no colour, as wide as the terminal."""
    return text_of(figure, Look(max(shutil.get_terminal_size().columns, 20))).removesuffix("\n")


def styled(text: str, look: Look, style: str = "") -> Text:
    """A line that fits."""
    from rich.text import Text

    return Text(cut(clean(text, look), look.width, look), style)


def _part(part: Part, look: Look) -> Iterator[Text]:
    match part:
        case Grid():
            yield from grid(part, look)
        case Bars():
            yield from _bars(part, look)
        case Words():
            yield from _words(part, look)
        case Rows():
            yield from _rows(part, look)


def _tabled(rows: list[list[str | Cell]], align: str, look: Look) -> Iterator[Text]:
    from rich.text import Text

    coloured = Look(look.width, True, look.plain)
    for line in table(rows, align, coloured):
        yield Text.from_ansi(line)


def _bars(part: Bars, look: Look) -> Iterator[Text]:
    yield styled(part.title + (f" ({part.unit})" if part.unit and part.unit not in part.title else ""), look, "bold")
    say = Numbers(part.values, part.scale, "-" if look.plain else "−")
    labels, said = shared(part.labels)
    if said:
        yield styled(said, look, "dim")
    shown = [cut(clean(label, look), max(look.width // 2, 8), look) for label in labels]
    numbers = [say(value) for value in part.values]
    details = [clean(detail, look) for detail in part.details] if part.details else []
    wide = [max(map(width, column), default=0) for column in (shown, numbers, details)]
    below = any(value < 0 for value in part.values)
    room = max(look.width - sum(wide) - 2 * (2 + below + bool(details)), 4)
    most = longest(part.values, part.scale)
    rows: list[list[str | Cell]] = []
    for i, value in enumerate(part.values):
        row = [Cell(shown[i]), Cell(numbers[i]), *_strips(value / most, room, look, below)]
        rows.append([*row, *([Cell(details[i], "dim")] if details else [])])
    yield from _tabled(rows, "lrrl" + "l" * bool(details) if below else "lrl" + "l" * bool(details), look)


def _strips(share: float, room: int, look: Look, below: bool) -> list[Cell]:
    """A bar; where there are numbers below zero, one to either side of a middle."""
    if not below:
        return [Cell(bar(share, room, look), "cyan")]
    half = max(room // 2, 2)
    left = ("#" if look.plain else "█") * round(max(-share, 0.0) * half)
    return [Cell(left.rjust(half), "magenta"), Cell(bar(max(share, 0.0), half, look), "cyan")]


def _words(part: Words, look: Look) -> Iterator[Text]:
    """The text, and under each piece its number."""
    from rich.text import Text

    yield styled(part.title + (f" ({part.unit})" if part.unit else ""), look, "bold")
    say, ends = Numbers(part.values, part.scale, "-" if look.plain else "−"), span(part.values, part.scale)
    numbered = any(value is not None for value in part.values)
    above, under, used = Text(), Text(), 0
    for piece, value in zip(part.pieces, part.values, strict=True):
        word, told = cut(clean(piece, look), look.width, look), say(value)
        columns = max(width(word), width(told))
        if used and used + 1 + columns > look.width:
            yield from _both(above, under, numbered)
            above, under, used = Text(), Text(), 0
        if used:
            above.append(" ")
            under.append(" ")
        above.append(word + " " * (columns - width(word)), painted(strength(value, ends)))
        under.append(told.rjust(columns), "dim")
        used += columns + bool(used)
    yield from _both(above, under, numbered)


def _both(above: Text, under: Text, numbered: bool) -> Iterator[Text]:
    """A line of pieces, and the numbers under it."""
    yield above
    if numbered:
        under.rstrip()
        yield under


def _rows(part: Rows, look: Look) -> Iterator[Text]:
    yield styled(part.title, look, "bold")
    cells: list[list[str | Cell]] = [[Cell(clean(name, look), "dim") for name in part.columns]]
    told = [in_column([row[i] for row in part.rows], look) for i in range(len(part.columns))]
    cells += [[column[i] for column in told] for i in range(len(part.rows))]
    count = range(len(part.columns))
    numeric = [all(not isinstance(row[i], str) or row[i].endswith(" %") for row in part.rows) for i in count]  # type: ignore[union-attr]
    wide = [max(width(_text(row[i])) for row in cells) for i in count]
    # Names, which come first, are what people copy, and numbers are whole or nothing: other texts are cut.
    gives = [i for i in count if i and not numeric[i]] or [0]
    while part.columns and sum(wide) + 2 * (len(wide) - 1) > look.width and max(wide[i] for i in gives) > 4:
        wide[max(gives, key=lambda i: wide[i])] -= 1
    shown: list[list[str | Cell]] = []
    for row in cells:
        cut_ = [(cell, cut(_text(cell), size, look)) for cell, size in zip(row, wide, strict=True)]
        shown.append([text if isinstance(cell, str) else Cell(text, cell.style) for cell, text in cut_])
    yield from _tabled(shown, "".join("r" if one else "l" for one in numeric), look)


def _text(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def joined(parts: Iterable[Text]) -> str:
    """Lines without colours, for tests."""
    return "\n".join(line.plain.rstrip() for line in parts)
