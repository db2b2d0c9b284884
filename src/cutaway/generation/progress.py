"""How far a long batch has come: a callback, and a line that listens to it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TextIO, TypeAlias

from cutaway.errors import RequestError
from cutaway.generation.row import Row

OFTEN, SELDOM = 0.1, 5.0  # seconds between two lines, on a terminal and elsewhere


class Tally(NamedTuple):
    """What there is so far.

    Attributes:
        finished: answers that are complete.
        answers: that were asked for.
        tokens: produced, of all answers.
    """

    finished: int
    answers: int
    tokens: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Tally:
        """Of a run's rows."""
        return cls(sum(row.finish_reason is not None for row in rows), len(rows), sum(len(row.tokens) for row in rows))


Report: TypeAlias = Callable[[Tally], None]


@contextmanager
def meter(
    progress: Report | bool | None, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Report | None]:
    """What to call with a tally, if anything.

    Args:
        progress: a function; True for a line on standard error: on a terminal one that changes and goes away, elsewhere
            a new one every few seconds; None for nothing.

    Raises:
        RequestError: something else.
    """
    if progress is None or progress is False:
        yield None
    elif progress is True:
        stream = sys.stderr if stream is None else stream
        line = _Line(stream, clock)
        try:
            yield line
        finally:
            line.close()
    elif callable(progress):
        yield progress
    else:
        raise RequestError("not a function", field="progress", expected="a function, True or None", got=progress)


class _Line:
    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._changes = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._start = clock()
        self._last: float | None = None if self._changes else self._start
        self._said = ""
        self._now = ""

    def __call__(self, tally: Tally) -> None:
        now = self._clock()
        rate = tally.tokens / (now - self._start) if now > self._start else 0.0
        self._now = f"{tally.finished:,} of {tally.answers:,} answers, {tally.tokens:,} tokens, {rate:,.1f} tokens/s"
        if self._last is None or now - self._last >= (OFTEN if self._changes else SELDOM):
            self._last = now
            self._say()

    def close(self) -> None:
        if self._changes:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
        elif self._said not in ("", self._now):  # what took no time is not worth a line
            self._say()

    def _say(self) -> None:
        self._said = self._now
        before, after = ("\r\x1b[K", "") if self._changes else ("", "\n")
        print(before + self._now, end=after, file=self._stream, flush=True)
