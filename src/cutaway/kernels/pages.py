"""Weights in large pages of memory.

A token reads every weight once, page after page. With pages of 4 KiB the processor looks up an address for every 64th
cache line, and in a virtual machine each look-up is itself several reads: SmolLM2 in fp32 writes 58 tokens a second
from small pages and 72 from large ones.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from threading import Thread, Timer

from torch import Tensor

from cutaway.kernels.stored import Stored

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_COLLAPSE = 25  # MADV_COLLAPSE: now, and whatever the system does by itself (Linux 6.1, madvise(2))
_ENOUGH = 3 / 4  # of a large page, which would otherwise take memory for nobody


def in_large_pages(weights: Iterable[Tensor], after: float = 1.0) -> Thread | None:
    """Have the system put memory that lies in small pages into large ones; the numbers and addresses stay.

    Beside what goes on: where a virtual machine has to ask for each large page, one takes milliseconds, in which
    nobody in the process gets memory. So it begins a while after the load, when the vocabulary has been read and the
    first token been written. What is freed meanwhile is no harm, since the system is asked about addresses and refuses
    those that are nobody's.

    Args:
        weights: of any type; those on a CPU.
        after: seconds until it begins.

    Returns:
        The thread that does it, or None where there is nothing to do or the system cannot.
    """
    try:
        size = int(_SIZE.read_text())
        advise = ctypes.CDLL(None).madvise
    except (OSError, ValueError, AttributeError):
        return None
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    runs = runs_of({_place(weight) for weight in weights if weight.device.type == "cpu"}, size)
    if not runs:
        return None

    def work() -> None:
        for start, length in runs:
            if advise(start, length, _COLLAPSE) and length > 2 * size:
                # Its first or last page may reach beyond what is anybody's, and then none of it is done.
                advise(start + size, length - 2 * size, _COLLAPSE)

    thread = Timer(after, work)
    thread.name, thread.daemon = "cutaway-pages", True
    thread.start()
    return thread


def runs_of(places: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Large pages that are mostly taken by what lies at these places, those side by side together: (start, bytes).

    Args:
        places: address and bytes of each, none over another.
        size: of a page.
    """
    used: Counter[int] = Counter()
    for start, n_bytes in places:
        for page in range(start // size, -(-(start + n_bytes) // size)):
            used[page] += min(start + n_bytes, (page + 1) * size) - max(start, page * size)
    runs: list[tuple[int, int]] = []
    for page in sorted(page for page, n_bytes in used.items() if n_bytes >= _ENOUGH * size):
        if runs and sum(runs[-1]) == page * size:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((page * size, size))
    return runs


def _place(weight: Tensor) -> tuple[int, int]:
    """Where it lies, and how many bytes."""
    data = weight.raw if isinstance(weight, Stored) else weight.detach()
    return data.data_ptr(), data.nbytes
