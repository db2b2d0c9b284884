"""Ctrl-C, SIGTERM and a terminal that closes (SIGHUP), at any time.

While large libraries import themselves an exception out of nowhere is often swallowed, and there is nothing yet to
tidy up. So a process leaves at once by default, and only within :func:`interruptible` is Ctrl-C an exception.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["interruptible", "leave_at_once"]

_STOPS = [number for number in signal.Signals if number.name in ("SIGTERM", "SIGHUP")]  # Windows lacks one


def leave_at_once() -> None:
    """For the rest of this process; called by its entry alone."""
    signal.signal(signal.SIGINT, _leave)
    _on_stop(_leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, Ctrl-C is ``KeyboardInterrupt``, the others ``SystemExit``: for long work, and work to tidy up after.

    Does nothing in a process that has its own rules (a test, a notebook), or within itself.
    """
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _on_stop(_stop)
    try:
        yield
    finally:
        leave_at_once()


def _on_stop(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in _STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
