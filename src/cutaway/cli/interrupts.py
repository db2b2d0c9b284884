"""Ctrl-C and SIGTERM, at any time.

While large libraries import themselves an exception out of nowhere is often swallowed, and there is nothing yet to
tidy up. So a process leaves at once by default, and only within :func:`interruptible` is Ctrl-C an exception.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interruptible", "leave_at_once"]


def leave_at_once() -> None:
    """For the rest of this process; called by its entry alone."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, Ctrl-C is ``KeyboardInterrupt`` and SIGTERM ``SystemExit``: for long work, and work to tidy up after.

    Does nothing in a process that has its own rules (a test, a notebook), or within itself.
    """
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        leave_at_once()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
