"""Folders for a pull to work in, which the next pull clears away where one was killed.

A folder is in use as long as somebody holds the lock on the file ``lock`` in it: the system lets go of that when a
process ends, however it ends. Where files cannot be locked, a folder is nobody's after an hour without a write.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cutaway.checkpoints.home import models_dir, scratch_dir

if sys.platform != "win32":
    import fcntl

__all__ = ["part_name", "sweep", "workplace"]

_STALE = 3600.0  # seconds


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder of one's own, gone afterwards."""
    scratch_dir().mkdir(parents=True, exist_ok=True)
    lock = None
    while lock is None:
        folder = Path(tempfile.mkdtemp(prefix="pull-", dir=scratch_dir()))
        # who sweeps in this very moment may be faster: then another folder it is
        lock = _taken(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def part_name(target: Path, folder: Path) -> Path:
    """Where a file is written that will be ``target``, by the pull that works in ``folder``."""
    return target.with_name(f".{target.name}.{folder.name}.part")


def sweep() -> None:
    """Remove what pulls left behind that were killed; nothing of one that goes on."""
    for folder in scratch_dir().glob("pull-*"):
        with suppress(OSError):  # somebody else sweeps too
            _clear(folder)
    for part in models_dir().glob(".*.part"):
        # a pull's folder is there before its part, and after it
        if not (scratch_dir() / part.name.split(".")[-2]).exists():
            with suppress(OSError):
                part.unlink()


def _clear(folder: Path) -> None:
    lock = None
    try:
        with suppress(FileNotFoundError):  # not made yet
            lock = os.open(folder / "lock", os.O_RDWR)
        free = None if lock is None else _lock(lock)
        if free or (free is None and _age(folder) > _STALE):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        if lock is not None:
            os.close(lock)


def _taken(folder: Path) -> int | None:
    """The lock of a new folder, held; None if the folder was swept before."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    if _lock(lock) is False or os.fstat(lock).st_nlink == 0:
        os.close(lock)
        return None
    return lock


def _lock(file: int) -> bool | None:
    """Whether it is ours now; None where there are no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _age(folder: Path) -> float:
    """Seconds since anything in it was written."""
    return time.time() - max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
