"""Stop texts: however a text arrives, what is shown is the text up to its first stop."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cutaway.generation.stop import StopText

LETTERS = st.text("ab¿", max_size=24)
STOPS = st.lists(st.text("ab¿", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> str:
    """Up to the stop that is complete first; of those that end together, the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(LETTERS, STOPS, st.lists(st.integers(0, 24)))
def test_any_split(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    gate, shown, wanted = StopText(stops), "", cut(text, stops)
    for a, b in pairwise(borders):
        shown += gate.push(text[a:b])
        assert wanted.startswith(shown)  # nothing is shown that has to be taken back
        if not gate.stopped:
            # ... and nothing is held back for longer than a stop may still come of it.
            held = text[len(shown) : b]
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    stopped = gate.stopped
    shown += gate.flush()
    assert shown == wanted
    assert stopped == (wanted != text)
    if stopped:
        assert gate.push("more") == ""
        assert gate.flush() == ""


def test_the_first_complete_stop_counts() -> None:
    """Whole or letter by letter: ``c`` is complete before ``bcd``."""
    for pieces in (["abcd"], list("abcd"), ["ab", "cd"]):
        gate = StopText(["bcd", "c"])
        assert "".join(gate.push(piece) for piece in pieces) == "ab"
        assert gate.stopped


def test_no_stops_hold_nothing_back() -> None:
    gate = StopText([])
    assert gate.push("anything") == "anything"
    assert gate.flush() == ""
