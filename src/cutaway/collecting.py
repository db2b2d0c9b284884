"""Python's collector of garbage, at rest while something large is put together."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is looked through for garbage meanwhile, and what came is old afterwards.

    Importing torch makes a million objects and reading a vocabulary a hundred thousand, all to stay: the collector
    would go through all of them again and again, for a third of a second. Were they young when it works again, it
    would go through them twice more, for a fifth of a second before a first token. The old ones are looked at when
    it next looks at everything.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # else somebody has frozen objects to stay so, and would find them thawed
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, wherever they were
            gc.enable()
