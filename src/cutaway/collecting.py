"""Python's collector of garbage, at rest while something large is put together."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is looked through for garbage meanwhile.

    Importing torch makes a million objects and reading a vocabulary a hundred thousand, all to stay: the collector
    would go through all of them again and again, for a third of a second.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
