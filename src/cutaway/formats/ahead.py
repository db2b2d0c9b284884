"""Tensors of a file on their way while something else is done.

::

    thread   one call of the system ─────────────► tensor after tensor, as they lie in the file
    caller   builds the model, reads the vocabulary …              takes one: waits until all are there

A call reads into as many tensors as lie side by side, and Python's lock is free meanwhile. A thread that read one
after another would ask for the lock after each, and wait five milliseconds for it while the caller has work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from threading import Thread
from typing import Any, TypeAlias, final

from torch import Tensor

from cutaway.formats.files import StrPath, empty_bytes

Call: TypeAlias = tuple[int, list[Any]]  # a place in the file, and what is filled from there on

_MOST_BYTES = 1 << 28  # of a call: it is over soon after nobody wants the rest; Linux takes up to 2 GiB
_MOST_BUFFERS = 512  # Linux takes 1,024
_LARGEST_GAP = 1 << 20  # between two tensors: read into nowhere


@final
class Ahead:
    """Begins to read at once. Only Linux is asked; elsewhere there is nothing to take.

    Args:
        descriptor: of the open file, which stays open until :meth:`stop`.
        places: name, offset and bytes of each tensor, none over another.
        path: for errors.

    Raises:
        ResourceError: there is not so much memory.
    """

    def __init__(self, descriptor: int, places: Iterable[tuple[str, int, int]], *, path: StrPath) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._ends: dict[str, int] = {}
        self._reached = 0
        self._stopped = False
        pieces: list[tuple[int, memoryview]] = []
        for name, offset, nbytes in sorted(places, key=lambda place: place[1]) if sys.platform == "linux" else ():
            self._tensors[name] = empty_bytes(nbytes, path=path, field=name)
            self._ends[name] = offset + nbytes
            pieces.append((offset, self._tensors[name].numpy().data))
        self._thread: Thread | None = Thread(
            target=self._work, args=(descriptor, list(calls(pieces))), name="cutaway-ahead"
        )
        try:
            self._thread.start()
        except RuntimeError:  # there is no thread to be had: nothing comes, and each tensor is read when it is wanted
            self._thread = None

    def take(self, name: str) -> Tensor | None:
        """One tensor's bytes, uint8 [nbytes], once; None where they did not come: who reads it then meets the error."""
        self._wait()
        tensor = self._tensors.pop(name, None)
        return tensor if tensor is not None and self._ends[name] <= self._reached else None

    def stop(self) -> None:
        """Let go of what nobody took, and of the file."""
        self._stopped = True
        self._wait()
        self._tensors.clear()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _work(self, descriptor: int, todo: list[Call]) -> None:
        for offset, buffers in todo:
            if self._stopped:
                return
            try:
                got = os.preadv(descriptor, buffers, offset)
            except OSError:
                return
            if got < sum(map(len, buffers)):
                return
            self._reached = offset + got


def calls(pieces: Iterable[tuple[int, memoryview]]) -> Iterator[Call]:
    """What is read at once, of pieces in the file's order: those that lie side by side, as far as a call goes."""
    start = end = size = 0
    buffers: list[Any] = []
    for offset, view in pieces:
        for at in range(0, len(view), _MOST_BYTES):
            part, place = view[at : at + _MOST_BYTES], offset + at
            full = size + len(part) > _MOST_BYTES or len(buffers) + 2 > _MOST_BUFFERS
            if buffers and (full or place - end > _LARGEST_GAP):
                yield start, buffers
                buffers, size = [], 0
            if not buffers:
                start = end = place
            if place > end:
                buffers.append(bytearray(place - end))
            buffers.append(part)
            size += len(part)
            end = place + len(part)
    if buffers:
        yield start, buffers
