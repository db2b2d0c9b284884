"""Opening, reading and writing files whose bytes nobody vouches for.

Every read of a model folder goes through here, and so does every write, so that one place
knows about FIFOs, links out of the folder, JSON bombs and half-written files.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cutaway.errors import (
    CutawayError,
    FormatError,
    LimitExceeded,
    ResourceError,
    ShardError,
    StorageError,
    TruncatedError,
    UnsafeFormatError,
)
from cutaway.formats.strict_json import Json, parse_json, pointer

__all__ = [
    "Json",
    "Progress",
    "StrPath",
    "atomic_write",
    "empty_bytes",
    "map_private",
    "nonfinite",
    "open_regular",
    "parse_json",
    "pointer",
    "read_head",
    "read_into",
    "read_json",
    "read_small",
    "refuse_foreign",
    "resolve_inside",
    "sniff",
]

Progress: TypeAlias = Callable[[int], None]
StrPath: TypeAlias = "str | os.PathLike[str]"

_CHUNK = 16 << 20  # bytes between two progress calls


# -- reading ---------------------------------------------------------------------------------


def open_regular(path: StrPath) -> BinaryIO:
    """Open a regular file for reading, and nothing else, without ever waiting.

    Errors: FormatError for a directory, FIFO, socket or device; StorageError when the system
    refuses (missing, dangling link, no permission). See open(2) on O_NONBLOCK.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
    try:
        fd = os.open(path, flags)
    except ValueError as error:
        raise StorageError("is not a usable path", path=path) from error
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device with no driver
            raise FormatError("is not a regular file", path=path) from error
        raise _refused("cannot be opened", path, error) from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a directory" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device"
        raise FormatError("is not a regular file", path=path, expected="a file", got=kind)
    return os.fdopen(fd, "rb")


def read_head(file: BinaryIO, path: StrPath) -> bytes:
    """The first 512 bytes, or all of a shorter file."""
    try:
        file.seek(0)
        return file.read(512)
    except OSError as error:
        raise _refused("cannot be read", path, error) from error


def sniff(head: bytes) -> str | None:
    """What a file is, by its first bytes (512 are plenty), or None if they say nothing.

    One of ``"gguf"``, ``"safetensors-like"``, ``"zip/pickle"``, ``"git-lfs pointer"``, ``"html"``.
    """
    # First, because a header length of 640 reads 80 02 00 …, which looks like a pickle.
    if len(head) > 8 and head[8:9] == b"{" and 0 < int.from_bytes(head[:8], "little") <= 100_000_000:
        return "safetensors-like"
    if head[:4] == b"GGUF":
        return "gguf"
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06") or head[:6] == b"\x93NUMPY" or head[257:262] == b"ustar":
        return "zip/pickle"
    # Protocol 2 to 5, then an opcode; past FRAME, four zeros are not opcodes but the rest of a header length.
    if re.match(rb"\x80[\2-\5][(-\x98]", head) and (head[2] == 0x95 or head[4:8] != bytes(4)):
        return "zip/pickle"
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "git-lfs pointer"
    if head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        return "html"
    return None


def refuse_foreign(head: bytes, *, path: StrPath, wanted: str) -> None:
    """Raise if a file that should be ``wanted`` plainly is another known thing (see `sniff`)."""
    kind = sniff(head)
    if kind == "zip/pickle":
        hint = "convert it to safetensors where you trust it; cutaway never unpickles"
        raise UnsafeFormatError("is a pickle or archive, not weights alone", path=path, expected=wanted, hint=hint)
    if kind == "git-lfs pointer":
        raise FormatError("is a Git LFS pointer, not the file itself", path=path, hint="git lfs pull")
    if kind == "html":
        hint = "a login or error page was probably saved; download it again"
        raise FormatError("is a web page", path=path, expected=wanted, hint=hint)
    if kind is not None and not kind.startswith(wanted):
        raise FormatError("is of another format", path=path, expected=wanted, got=kind)


def empty_bytes(nbytes: int, *, path: StrPath, field: str | None = None) -> torch.Tensor:
    """Fresh private memory, uint8 [nbytes]. ResourceError when there is none."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ResourceError("does not fit into memory", path=path, field=field, got=f"{nbytes} bytes") from error


def read_into(
    file: BinaryIO,
    offset: int,
    into: npt.NDArray[np.uint8],
    *,
    path: StrPath,
    field: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Fill ``into`` (uint8, contiguous) from a file, so that nothing done to the file later reaches it.

    ``progress`` gets the number of bytes just read. Errors: TruncatedError if the file ends
    early, StorageError if it cannot be read.
    """
    view = into.reshape(-1).data
    done = 0
    try:
        file.seek(offset)
        while done < len(view):
            got = file.readinto(view[done : done + _CHUNK])  # type: ignore[attr-defined]
            if not got:
                raise TruncatedError(
                    "ends early", path=path, field=field, offset=offset + done, expected=f"{len(view)} bytes", got=done
                )
            done += got
            if progress is not None:
                progress(got)
    except OSError as error:
        raise _refused("cannot be read", path, error) from error


def nonfinite(tensor: torch.Tensor) -> int:
    """How many numbers of a floating or complex tensor are NaN or infinite."""
    # Eight-bit floats know no isfinite; parts, as a second copy of a large tensor is not needed.
    wide = torch.float32 if tensor.dtype.itemsize == 1 else tensor.dtype
    parts = torch.split(tensor.reshape(-1), 1 << 22)
    return sum(part.numel() - int(part.to(wide).isfinite().sum()) for part in parts)


def map_private(file: BinaryIO, path: StrPath) -> npt.NDArray[np.uint8]:
    """The whole of a file that is not empty as writable copy-on-write memory, uint8 [size].

    Changes here never reach the file, but changes to the file may show here, and cutting it
    short kills the process (SIGBUS): only for people who ask for it.
    """
    try:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    except (OSError, ValueError) as error:
        raise StorageError("cannot be mapped", path=path, got=error) from error


def read_small(path: StrPath, *, limit: int) -> bytes:
    """A whole file of at most ``limit`` bytes. LimitExceeded past that, before reading it."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise LimitExceeded("is too large", path=path, expected=f"at most {limit} bytes", got=size)
        try:
            return file.read(limit)
        except OSError as error:
            raise _refused("cannot be read", path, error) from error


def resolve_inside(
    root: StrPath, name: str, *, error: type[CutawayError] = ShardError, field: str | None = None
) -> Path:
    """The real path of ``root/name``, where a stranger chose ``name``. It need not exist.

    Absolute names, ``..``, backslashes and control characters are refused, and so are links
    out of ``root``; but a hub snapshot may link to the blobs beside it, as its cache is built so
    (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
    """
    parts = name.split("/")
    longest = max(len(part.encode(errors="replace")) for part in parts)
    odd = not name.isprintable() or "\\" in name or re.match("[A-Za-z]:", name) or longest > 255
    if odd or {"", ".", ".."} & {*parts}:
        raise error("is not a plain file name", path=root, field=field, got=name)
    base = Path(os.path.realpath(root))
    real = Path(os.path.realpath(base / name))
    homes = [base]
    for folder in (base, *base.parents):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            homes += [folder, folder.parent.parent / "blobs"]
    if not any(real.is_relative_to(home) for home in homes):
        raise error("links out of its folder", path=root, field=field, got=name)
    return real


def read_json(path: StrPath, *, limit: int, error: type[CutawayError] = FormatError) -> Json:
    """`parse_json` of a file of at most ``limit`` bytes."""
    return parse_json(read_small(path, limit=limit), path=path, limit=limit, error=error)


# -- writing ---------------------------------------------------------------------------------


_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.tmp")
_OLD = 3600.0  # seconds


@contextlib.contextmanager
def atomic_write(path: StrPath, *, expect: int = 0) -> Iterator[BinaryIO]:
    """Write a file so that ``path`` is, at every moment, the old file or the whole new one.

    Yields a new file beside it (its path is ``.name``), which is synced and renamed at the end
    and removed upon any error. ``expect`` is about how many bytes will come; too full a disk is
    refused before the first. Errors: StorageError. Mode: 0666 less the umask. See rename(2).
    """
    made, temp = False, Path(path)
    try:
        target = Path(os.path.realpath(path))  # a link stays, and what it points to is replaced
        temp = target.parent / f".{secrets.token_hex(8)}.tmp"  # fixed length: the name itself may be 255 bytes
        if expect and (free := shutil.disk_usage(target.parent).free) < expect:
            raise StorageError("disk is too full", path=path, expected=f"{expect} bytes free", got=free)
        if target.is_dir():
            raise StorageError("is a directory", path=path, expected="a file to write")
        if target.exists() and not target.is_file():  # a device or a pipe must not be replaced by a file
            raise StorageError("is not a regular file", path=path, expected="a file to write")
        with open(temp, "xb") as file:
            made = True
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            yield file
            file.flush()
        # By name: the safetensors library puts a file of its own there, readable by the owner only.
        os.chmod(temp, mode)
        _sync(temp)
        os.replace(temp, target)
        made = False
        _sync(target.parent)
    except ValueError as error:
        if "null" not in str(error):
            raise
        raise StorageError("is not a usable path", path=path) from error
    except OSError as error:
        raise _refused("cannot be written", path, error) from error
    finally:
        if made:
            with contextlib.suppress(OSError):
                os.unlink(temp)


def sweep(folder: Path) -> None:
    """Remove what killed writers left in a folder: files under the names that unfinished ones have, an hour old."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if _UNFINISHED.fullmatch(path.name) and time.time() - path.stat().st_mtime > _OLD:
                path.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems cannot sync a directory and say so in these words.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(fd)


def _refused(what: str, path: StrPath, error: OSError) -> StorageError:
    return StorageError(what, path=path, got=error.strerror or repr(error))
