"""What a result looks like, before anything draws it: the same parts for a terminal, a notebook and ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Scale: TypeAlias = Literal["share", "signed", "plain"]
"""``share``: 0 to 1. ``signed``: 0 is the middle, equal room either way. ``plain``: from the least to the most."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Numbers by row and column, as colours; with words in the cells where there are such.

    Attributes:
        rows: a label each. columns: a label each.
        values: what colours the cells; None where there is nothing. [row][column]
        texts: what stands in the cells, instead of the numbers. [row][column]
        scale: what the colours span.
        across, down: what the columns and the rows are (``"position"``, ``"layer"``).
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    texts: Sequence[Sequence[str]] | None = None
    scale: Scale = "plain"
    across: str = ""
    down: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """One number a label, as bars.

    Attributes:
        labels: a label each. values: a number each.
        unit: what the numbers are (``"probability"``, ``"nats"``).
        details: a few more words each, set after the number.
    """

    title: str
    labels: Sequence[str]
    values: Sequence[float]
    unit: str = ""
    scale: Scale = "plain"
    details: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Words:
    """A text whose pieces carry numbers, as a coloured background.

    Attributes:
        pieces: the text, piece by piece. values: a number each, None where there is nothing.
        unit: what the numbers are.
    """

    title: str
    pieces: Sequence[str]
    values: Sequence[float | None]
    unit: str = ""
    scale: Scale = "signed"


@dataclass(frozen=True, slots=True)
class Rows:
    """A plain table, for what has no colour.

    Attributes:
        columns: a heading each. rows: a cell each, as text or number. [row][column]
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | float]]


Part: TypeAlias = Grid | Bars | Words | Rows


@dataclass(frozen=True, slots=True)
class Figure:
    """A result to look at.

    Attributes:
        title: what is shown, of which model and text.
        parts: drawn one below the other.
        notes: what is the model's own and what is an approximation, a sentence each.
    """

    title: str
    parts: Sequence[Part]
    notes: Sequence[str] = ()
