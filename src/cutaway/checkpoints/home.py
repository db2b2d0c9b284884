"""Where cutaway keeps what it fetched itself, and whether it may use the network.

Files of the model hub never come here, only notes on which of them were checked: they live in the hub's own cache.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cutaway.errors import StorageError

__all__ = ["home", "is_offline", "models_dir", "note_verified", "scratch_dir", "was_verified"]


def home() -> Path:
    """``$CUTAWAY_HOME``, or ``cutaway`` in the platform's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``).

    Raises:
        StorageError: there is no home folder to start from.
    """
    if own := os.environ.get("CUTAWAY_HOME"):
        return Path(own).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):  # the XDG rules: a relative value is to be ignored
        return Path(cache) / "cutaway"
    if os.name == "nt" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "cutaway"
    try:
        return Path.home() / ".cache" / "cutaway"
    except RuntimeError as error:
        raise StorageError("there is no home folder", hint="set CUTAWAY_HOME to a folder of yours") from error


def models_dir() -> Path:
    """Where catalogue files live. It may not exist yet."""
    return home() / "models"


def scratch_dir() -> Path:
    """Where downloads happen before they are taken apart. It may not exist yet."""
    return home() / "tmp"


def is_offline(asked: bool = False) -> bool:
    """Whether the network is off limits: asked for by the caller, or by ``HF_HUB_OFFLINE`` for everything."""
    return asked or os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "TRUE", "YES", "ON"}


def _note_of(path: Path, digest: str) -> tuple[Path, str]:
    real = path.resolve()
    stat = real.stat()
    place = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    return home() / "verified" / f"{digest}-{place}", f"{stat.st_size} {stat.st_mtime_ns}"


def was_verified(path: Path, digest: str) -> bool:
    """Whether this very file, unchanged since, was found to have this checksum."""
    note, says = _note_of(path, digest)
    try:
        return note.read_text() == says
    except OSError:
        return False


def note_verified(path: Path, digest: str) -> None:
    """Remember that it was."""
    note, says = _note_of(path, digest)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(says)
    except OSError:  # it will be checked again next time
        pass


def checksum(path: Path, like: str) -> str:
    """sha256 of the file, or git's sha1 of it, whichever ``like`` is."""
    with path.open("rb") as file:
        if len(like) == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        head = b"blob %d\0" % os.fstat(file.fileno()).st_size
        return hashlib.file_digest(file, lambda: hashlib.sha1(head, usedforsecurity=False)).hexdigest()
