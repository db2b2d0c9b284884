"""How a long transfer tells where it stands: a callback, and a bar that listens to it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Protocol, TextIO

__all__ = ["Progress", "show_progress", "tqdm_class"]


class Progress(Protocol):
    """Called with the bytes done, the bytes in all (0 when unknown) and what is going on, from any thread."""

    def __call__(self, done: int, total: int, label: str, /) -> None: ...


@contextmanager
def show_progress(
    quiet: bool = False,
    *,
    label: str = "",
    stream: TextIO | None = None,
    interval: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """A ``Progress`` for people, on standard error: a bar on a terminal, else one plain line per ``interval`` seconds.

    A bar stands there at once, called ``label`` until something is reported.

    >>> with show_progress(quiet=True) as report:
    ...     report(1, 2, "nothing is shown")
    """
    stream = sys.stderr if stream is None else stream
    if quiet:
        yield _silent
    elif stream.isatty():
        with _bar(stream, label) as report:
            yield report
    else:
        yield _lines(stream, interval, clock)


def tqdm_class(progress: Progress | None, label: str) -> type:
    """A class with the part of tqdm that huggingface_hub calls, which hands its bytes on to ``progress``."""
    lock = Lock()

    class Meter:
        def __init__(self, *args: Any, total: int | None = None, desc: str = "", unit: str = "it", **rest: Any) -> None:
            self.total = total
            self.n = 0
            self.format_dict: dict[str, Any] = {}
            # of its three bars this one counts the bytes that are on the disk
            self.counts = unit == "B" and desc.startswith("Reconstructing")

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += int(n or 0)
                if progress is not None and self.counts:
                    progress(self.n, self.total or 0, label)

        def refresh(self) -> None: ...
        def close(self) -> None: ...
        def set_description(self, *args: Any, **rest: Any) -> None: ...
        def set_description_str(self, *args: Any, **rest: Any) -> None: ...
        def set_postfix_str(self, *args: Any, **rest: Any) -> None: ...

        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *args: object) -> None: ...

    return Meter


def _silent(done: int, total: int, label: str, /) -> None:
    pass


def _lines(stream: TextIO, interval: float, clock: Callable[[], float]) -> Progress:
    last_time: float | None = None
    last_label = ""

    def report(done: int, total: int, label: str, /) -> None:
        nonlocal last_time, last_label
        now = clock()
        finished = 0 < total <= done
        due = last_time is None or label != last_label or now - last_time >= interval
        if not (due or finished):
            return
        last_time, last_label = now, label
        of = f" of {_size(total)} ({100 * done // total} %)" if total else ""
        print(f"{label}: {_size(done)}{of}", file=stream, flush=True)

    return report


@contextmanager
def _bar(stream: TextIO, label: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        # the label may hold a file's name: it is text, not markup
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(file=stream), transient=True) as bars:
        task = bars.add_task(label, total=None)

        def report(done: int, total: int, label: str, /) -> None:
            bars.update(task, completed=done, total=total or None, description=label)

        yield report


def _size(count: int) -> str:
    """
    >>> _size(98_362_432)
    '93.8 MiB'
    """
    if count < 1024:
        return f"{count} B"
    size = count / 1024
    for unit in ("KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
