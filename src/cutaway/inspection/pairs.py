"""Two texts beside one another: where they part, and what lines up where one is longer."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Literal, TypeAlias

from cutaway.errors import RequestError

Align: TypeAlias = Literal["end"] | None

AROUND = 4  # pieces that are shown on either side of where texts part


def beside(one: Sequence[str], two: Sequence[str]) -> tuple[str, str, str]:
    """Both texts with what differs in brackets, and where they begin to be of different lengths.

    >>> beside(["The", " sea", " of", " sand"], ["The", " sea", " of", " wa", "ter"])
    ('4: The| sea| of|[ sand]', '5: The| sea| of|[ wa|ter]', 'From token 3 on: “ sand” beside “ wa|ter”.')
    """
    parts = SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
    longer = next((part for part in parts if part[2] - part[1] != part[4] - part[3]), None)
    if longer is None:
        return "|".join(one), "|".join(two), ""
    _, i, i_end, j, j_end = longer
    shown = (_shown(one, i, i_end), _shown(two, j, j_end))
    at = f"From token {i} on: “{'|'.join(one[i:i_end])}” beside “{'|'.join(two[j:j_end])}”."
    return *shown, at


def _shown(pieces: Sequence[str], first: int, end: int) -> str:
    before = ["…"] * (first > AROUND) + [*pieces[max(0, first - AROUND) : first]]
    after = [*pieces[end : end + AROUND]] + ["…"] * (len(pieces) - end > AROUND)
    return f"{len(pieces)}: " + "|".join([*before, f"[{'|'.join(pieces[first:end])}]", *after])


def places_beside(lengths: tuple[int, int], chosen: Sequence[int], stated: bool) -> list[int]:
    """Places of the first text, as counted from the end, where −1 is the last: there both have a token.

    Where one text is longer its first tokens have nobody beside them, and the first of the shorter is left out unless
    it was asked for: nearly every head rests there (Xiao et al. 2024), so that its stream is like no other token's.

    Args:
        lengths: of both.
        chosen: places of the first, from the start. stated: whether somebody chose them.

    Raises:
        RequestError: no such place in the other, or none at all.
    """
    n, m = lengths
    found = [place - n for place in chosen]
    if n == m:
        return found
    if stated and min(found) < -m:
        what = "the other text, aligned from the end, has no token there"
        raise RequestError(what, field="positions", expected=f"{n - m}…{n - 1}", got=min(found) + n)
    found = found if stated else [place for place in found if place > -min(n, m)]
    if not found:
        raise RequestError("too short to be aligned", field="align", expected="2 tokens or more in each", got=min(n, m))
    return found
