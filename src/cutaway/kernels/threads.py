"""Small work beside the native library's: on one thread.

PyTorch shares larger tensors out among OpenMP's threads, and those go on looking for work for milliseconds after it:
on a small machine they take the very core that the library's own thread waits for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

SMALL = 1 << 21  # numbers up to which sharing out costs more than it gains


class alone:  # noqa: N801 (used like a word: ``with alone():``)
    """PyTorch's operations of this thread, on this thread alone, while it lasts.

    Args:
        numbers: how many there are to compute with; past ``SMALL`` nothing changes.
    """

    __slots__ = ("_few", "_threads")

    def __init__(self, numbers: int = 0) -> None:
        self._few = numbers <= SMALL

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        if self._few and (change := _set_threads()) is not None:
            change(1)

    def __exit__(self, *exception: object) -> None:
        if self._few and (change := _set_threads()) is not None:
            change(self._threads)


@cache
def _set_threads() -> Callable[[int], Any] | None:
    """OpenMP's own setting, which is each thread's; ``torch.set_num_threads`` is also for threads that begin later."""
    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).omp_set_num_threads
    except (OSError, AttributeError):  # another system, or another way of sharing out
        return None
    found.argtypes, found.restype = (ctypes.c_int,), None
    return found
