"""One process at a time: a file beside the one that is being written, locked as long as somebody works.

The system lets go of a lock when its process ends, however it ends, so a file that a killed process left behind is
simply taken over. Where files cannot be locked (some network file systems), the process that it names decides.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cutaway.errors import LockedError, StorageError
from cutaway.formats.files import StrPath

if sys.platform != "win32":
    import fcntl

__all__ = ["locked"]


@contextmanager
def locked(path: StrPath) -> Iterator[None]:
    """Be the only one that works on a file, which need not be there; ``path``.lock is, meanwhile.

    Raises:
        LockedError: somebody else does.
        StorageError: the disk refuses.
    """
    name = Path(f"{os.fspath(path)}.lock")
    try:
        file = _taken(name, path)
    except OSError as error:
        raise _refused(name, error) from error
    try:
        try:
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, f"{os.getpid()} {socket.gethostname()}\n".encode())
        except OSError as error:
            raise _refused(name, error) from error
        yield
    finally:
        with suppress(OSError):
            os.unlink(name)  # while it is still ours: whoever waits with it open will see that it is gone
        os.close(file)


def _refused(name: Path, error: OSError) -> StorageError:
    return StorageError("cannot be locked", path=name, got=error.strerror or repr(error))


def _taken(name: Path, path: StrPath) -> int:
    while True:
        file = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            free = _lock(file)
            owner = os.read(file, 300).decode("utf-8", "replace").split()
            if free is False or (free is None and _is_alive(owner)):
                who = f"process {owner[0]} on {owner[1]}" if len(owner) == 2 else "another process"
                hint = "Wait for it." if free is False else f"Wait for it; if there is no such process, delete {name}."
                raise LockedError("somebody else is writing there", path=path, got=who, hint=hint)
            if _is_still(name, file):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


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


def _is_still(name: Path, file: int) -> bool:
    """Whether the name still leads to this file: who had it before may just have removed it."""
    try:
        return os.path.samestat(os.stat(name), os.fstat(file))
    except FileNotFoundError:
        return False


def _is_alive(owner: list[str]) -> bool:
    """Whether the process that a lock names may still run; of another machine nobody can tell."""
    if len(owner) != 2 or not owner[0].isdecimal():
        return False
    if owner[1] != socket.gethostname() or sys.platform == "win32":
        return True
    try:
        os.kill(int(owner[0]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
