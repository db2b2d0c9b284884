"""How far a sweep has come: a callback, or a line that listens to it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from cutaway.errors import RequestError

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many runs are done, and how many there are."""

OFTEN = 0.1  # seconds between two lines


@contextmanager
def counted(progress: Progress | bool | None, of: int, what: str) -> Iterator[Progress]:
    """What to call with how many are done, and of how many.

    Args:
        progress: a function; True for a line on standard error that changes and goes away, on a terminal; or nothing.
        of: how many there will be; told at once, with none done.
        what: a word for them.

    Raises:
        RequestError: something else.
    """
    if progress is True:
        report, close = _line(what)
    elif progress is None or progress is False:
        report, close = (lambda done, of: None), (lambda: None)
    elif callable(progress):
        report, close = progress, (lambda: None)
    else:
        raise RequestError("not a function", field="progress", expected="a function, True or None", got=progress)
    try:
        report(0, of)
        yield report
    finally:
        close()


def _line(what: str) -> tuple[Progress, Callable[[], None]]:
    shows = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    last = [float("-inf")]

    def report(done: int, of: int) -> None:
        now = time.monotonic()
        if shows and now - last[0] >= OFTEN:
            last[0] = now
            print(f"\r\x1b[K{done:,} of {of:,} {what}", end="", file=sys.stderr, flush=True)

    def close() -> None:
        if shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    return report, close
