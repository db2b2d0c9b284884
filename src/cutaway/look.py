"""Text made fit to look at: the invisible shown, bars drawn, columns fitted to a terminal. Imports nothing heavy."""

from __future__ import annotations

import math
import os
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

__all__ = ["Cell", "Look", "bar", "cut", "safe", "table", "visible", "width"]

_EIGHTHS = " ▏▎▍▌▋▊▉"
_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
_SHOWN = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_SPELT = {" ": "_", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


class Cell(NamedTuple):
    """Text with style words (``"bold cyan"``)."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """What the place of output can show.

    Attributes:
        width: columns.
        colour: whether escape sequences are welcome.
        plain: whether only ASCII can be said.
        fits: whether a line longer than that is a fault; in a file or pipe it is not.
    """

    width: int = 80
    colour: bool = False
    plain: bool = False
    fits: bool = True

    @classmethod
    def of(cls, stream: TextIO, *, terminal: bool = True) -> Look:
        """Of a stream; ``terminal=False`` for what ends in a file."""
        colour = (
            terminal and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"
        )
        encoding = getattr(stream, "encoding", None) or "ascii"
        try:
            "█▏·├⏎…".encode(encoding)
            plain = False
        except (UnicodeEncodeError, LookupError):
            plain = terminal
        fits = terminal and (stream.isatty() or "COLUMNS" in os.environ)
        return cls(max(shutil.get_terminal_size().columns, 20), colour, plain, fits)

    def paint(self, text: str, style: str) -> str:
        """Text in a style, where there is colour."""
        if not (self.colour and style and text):
            return text
        codes = ";".join(str(_STYLES[word]) for word in style.split())
        return f"\x1b[{codes}m{text}\x1b[0m"

    @property
    def dot(self) -> str:
        """What stands between two facts of one line."""
        return "-" if self.plain else "·"


def visible(text: str, look: Look) -> str:
    """A token's text: spaces at its ends, line ends and whatever does not print made visible.

    >>> visible(" Paris\\n", Look())
    '·Paris⏎'
    """
    marks = _SPELT if look.plain else _SHOWN
    start, stop = len(text) - len(text.lstrip(" ")), len(text.rstrip(" "))
    out = []
    for place, letter in enumerate(text):
        if letter == " " and start <= place < stop:
            out.append(letter)
        else:
            out.append(marks.get(letter) or _printable(letter, look.plain))
    return "".join(out)


def _printable(letter: str, plain: bool) -> str:
    if not letter.isprintable():
        return letter.encode("unicode_escape").decode()
    return letter.encode("ascii", "backslashreplace").decode() if plain else letter


def safe(text: str) -> str:
    """Text that a terminal cannot take for commands: a model can write escape sequences too."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)


def width(text: str) -> int:
    """Columns that a text takes on a terminal.

    >>> width("日本"), width("é")
    (4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, columns: int, look: Look, *, left: bool = False) -> str:
    """At most so many columns of a text; what is left out shows as an ellipsis, at the left if asked."""
    if width(text) <= columns:
        return text
    mark = "~" if look.plain else "…"
    letters = text[::-1] if left else text
    out = ""
    for letter in letters:
        if width(out) + width(letter) > columns - 1:
            break
        out += letter
    return mark + out[::-1] if left else out + mark


def bar(share: float, columns: int, look: Look) -> str:
    """A bar of ``share`` (0 to 1) of the columns, to an eighth of one; none for NaN.

    >>> bar(0.5, 5, Look())
    '██▌'
    """
    share = 0.0 if math.isnan(share) else min(max(share, 0.0), 1.0)
    if look.plain:
        return "#" * round(share * columns)
    whole, eighths = divmod(round(share * columns * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()


def table(rows: Sequence[Sequence[str | Cell]], align: str, look: Look, *, gives: int = 0, gap: int = 2) -> list[str]:
    """Rows in columns, each aligned ``l`` or ``r``; where it is too wide, column ``gives`` is cut."""
    cells = [[Cell(c) if isinstance(c, str) else c for c in row] for row in rows]
    widths = [max((width(row[i].text) for row in cells), default=0) for i in range(len(align))]
    excess = sum(widths) + gap * (len(align) - 1) - look.width
    if excess > 0 and look.fits:
        widths[gives] = max(widths[gives] - excess, 4)
    lines = []
    for row in cells:
        parts = []
        for cell, columns, side in zip(row, widths, align, strict=True):
            text = cut(cell.text, columns, look)
            pad = " " * (columns - width(text))
            shown = look.paint(text, cell.style)
            parts.append(pad + shown if side == "r" else shown + pad)
        lines.append((" " * gap).join(parts).rstrip())
    return lines
