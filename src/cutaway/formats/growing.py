"""A file that grows by lines: whole at every moment but for its last line, which is cut off where a write was."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cutaway.errors import StorageError
from cutaway.formats.files import StrPath

__all__ = ["GrowingFile"]


class GrowingFile:
    """Lines at the end of a file. Made by :meth:`open`.

    Args:
        path: what errors call it.
        file: its descriptor.
    """

    def __init__(self, path: StrPath, file: int) -> None:
        self.path = path
        self._file = file

    @classmethod
    @contextmanager
    def open(cls, path: StrPath) -> Iterator[GrowingFile]:
        """Open a file, made where there is none; the lines that are there stay.

        Raises:
            StorageError: no regular file, or the disk refuses.
        """
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        try:
            file = os.open(path, flags, 0o666)
        except ValueError as error:
            raise StorageError("is not a usable path", path=path) from error
        except OSError as error:
            raise _refused(path, error) from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise StorageError("is not a regular file", path=path, expected="a file to write")
            yield cls(path, file)
        finally:
            os.close(file)

    @property
    def size(self) -> int:
        """Bytes, those of a last line that is not whole among them."""
        return os.fstat(self._file).st_size

    def lines(self) -> Iterator[bytes]:
        """Each line that is whole, without its end."""
        held = b""
        os.lseek(self._file, 0, os.SEEK_SET)
        while some := os.read(self._file, 1 << 20):
            *whole, held = (held + some).split(b"\n")
            yield from whole

    def cut(self, size: int) -> None:
        """Leave the first bytes only."""
        try:
            os.ftruncate(self._file, size)
            os.fsync(self._file)
        except OSError as error:
            raise _refused(self.path, error) from error

    def append(self, lines: bytes) -> None:
        """Add lines, and return when the disk has them; where it refuses, what was there stays as it was.

        Raises:
            StorageError: it does.
        """
        before = os.lseek(self._file, 0, os.SEEK_END)
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(self._file, before)
            if isinstance(error, OSError):
                raise _refused(self.path, error) from error
            raise


def _refused(path: StrPath, error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = "Free some space; what is there stays, and the same call goes on from it." if full else None
    return StorageError("cannot be written", path=path, got=error.strerror or repr(error), hint=hint)
