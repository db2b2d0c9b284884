"""A figure as HTML that needs nothing else: no script, nothing fetched, tables that a reader can read aloud.

Text takes the page's own colour and cells are tinted over its ground, so that it suits light and dark alike.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from cutaway.inspection.drawn.style import STYLE
from cutaway.inspection.drawn.words import Numbers, clean, in_column, longest, shared, span, strength
from cutaway.inspection.figure import Bars, Figure, Grid, Part, Rows, Words
from cutaway.look import Look

LARGEST = 280_000  # bytes of a figure, style and all: a notebook keeps every one of them
MOST = 4000  # cells of a part, at first
_LOOK = Look()


def fragment(figure: Figure) -> str:
    """A figure as part of a page, below 300 KB: where there is more, the first rows and columns, and it says so."""
    most = MOST
    while True:
        parts = "".join(_part(part, most) for part in figure.parts)
        notes = "".join(f"<li>{_e(note)}</li>" for note in figure.notes)
        body = f"<h3>{_e(figure.title)}</h3>{parts}" + (f"<ul>{notes}</ul>" if notes else "")
        text = f'<style>{STYLE}</style><section class="cutaway-figure">{body}</section>'
        if len(text.encode()) <= LARGEST or most <= 1:
            return text
        most //= 2


def document(figure: Figure) -> str:
    """A page by itself."""
    title = _e(figure.title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    scheme = "<style>:root{color-scheme:light dark}body{font-family:system-ui,sans-serif;margin:2em}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}{scheme}</head><body>{fragment(figure)}</body></html>\n'


def _e(text: str) -> str:
    """A text as a page may have it: nothing in it is markup."""
    return html.escape(clean(text, _LOOK)[:400])


def _part(part: Part, most: int) -> str:
    match part:
        case Grid():
            return _grid(part, most)
        case Bars():
            return _bars(part, most)
        case Words():
            return _words(part, most)
        case Rows():
            return _rows(part, most)


def _tint(level: int) -> str:
    return f' class="{"p" if level > 0 else "n"}{abs(level)}"' if level else ""


def _table(title: str, head: Sequence[str], rows: Sequence[str], note: str = "") -> str:
    top = f"<thead><tr>{''.join(head)}</tr></thead>" if head else ""
    said = f"<small> {_e(note)}</small>" if note else ""
    return f"<div><table><caption>{_e(title)}{said}</caption>{top}<tbody>{''.join(rows)}</tbody></table></div>"


def _column(name: str) -> str:
    return f'<th scope="col">{_e(name)}</th>'


def _first(shown: int, there: int, what: str) -> str:
    return f"the first {shown:,} of {there:,} {what}" if shown < there else ""


def _grid(part: Grid, most: int) -> str:
    labels, said = shared(part.rows)
    width = min(len(part.columns), max(int(most**0.5), most // max(len(labels), 1), 1))
    height = min(len(labels), max(most // max(width, 1), 1))
    flat = [value for row in part.values for value in row]
    say, ends = Numbers(flat, part.scale), span(flat, part.scale)
    rows = []
    for i in range(height):
        cells = []
        for j in range(width):
            value = part.values[i][j]
            word = f"{_e(part.texts[i][j])} " if part.texts else ""
            number = say(value)
            told = f"{word}<i>{number}</i>" if word else number
            cells.append(f"<td{_tint(strength(value, ends))}>{told}</td>")
        rows.append(f'<tr><th scope="row">{_e(labels[i])}</th>{"".join(cells)}</tr>')
    axes = f"{part.down} by {part.across}" if part.down and part.across else part.down or part.across
    cuts = [_first(height, len(labels), "rows"), _first(width, len(part.columns), "columns")]
    note = "; ".join(word for word in (axes, f"{part.down or 'row'} *: {said}" if said else "", *cuts) if word)
    head = ["<td></td>", *(_column(name) for name in part.columns[:width])]
    return _table(part.title, head, rows, note)


def _bars(part: Bars, most: int) -> str:
    say, end = Numbers(part.values, part.scale), longest(part.values, part.scale)
    shown = min(len(part.values), max(most // 3, 1))
    rows = []
    for i in range(shown):
        value = part.values[i]
        share = min(abs(value) / end, 1.0) if value == value else 0.0
        below = ' class="below"' if value < 0 else ""
        # The number says it; what is drawn is for eyes alone.
        drawn = f'<td aria-hidden="true"><b{below} style="width:{100 * share:.1f}%"></b></td>'
        detail = f"<td>{_e(part.details[i])}</td>" if part.details else ""
        rows.append(f'<tr><th scope="row">{_e(part.labels[i])}</th><td>{say(value)}</td>{drawn}{detail}</tr>')
    note = "; ".join(word for word in (part.unit, _first(shown, len(part.values), "bars")) if word)
    return _table(part.title, [], rows, note).replace("<table>", '<table class="bars">', 1)


def _words(part: Words, most: int) -> str:
    say, ends = Numbers(part.values, part.scale), span(part.values, part.scale)
    shown = min(len(part.pieces), max(most // 4, 1))
    words = [
        f"<ruby{_tint(strength(value, ends))}>{_e(piece)}<rt>{say(value)}</rt></ruby>"
        for piece, value in zip(part.pieces[:shown], part.values[:shown], strict=True)
    ]
    note = "; ".join(word for word in (part.unit, _first(shown, len(part.pieces), "pieces")) if word)
    said = f"<small> {_e(note)}</small>" if note else ""
    return f"<p><strong>{_e(part.title)}{said}</strong><br>{' '.join(words)}</p>"


def _rows(part: Rows, most: int) -> str:
    shown = min(len(part.rows), max(most // max(len(part.columns), 1), 1))
    told = [in_column([row[i] for row in part.rows[:shown]], _LOOK) for i in range(len(part.columns))]
    escape: Callable[[str], str] = lambda cell: html.escape(cell[:400])  # noqa: E731
    rows = [f"<tr>{''.join(f'<td>{escape(column[i])}</td>' for column in told)}</tr>" for i in range(shown)]
    return _table(part.title, [_column(name) for name in part.columns], rows, _first(shown, len(part.rows), "rows"))
