"""Fetch from the model hub through huggingface_hub, into its own cache.

huggingface_hub 2.4 does the cache, the locks, the token, the endpoint, and within one file the retries after a HEAD
that failed, a busy server (Retry-After) or a connection that closed (Range). What it does not do is here:

- no byte is trusted before its checksum was found right (it compares sizes only);
- no server chooses a file's name (it takes any ETag for one): ``hub_names``;
- what failed for a moment and it gave up on (5xx on a listing or a body, a reset) is tried again, slower each time;
- its exceptions become cutaway's; its own telemetry stays off.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.checkpoints.home import checksum, is_offline, note_verified, was_verified
from cutaway.checkpoints.hub_errors import translated, wait_before_retry
from cutaway.checkpoints.hub_id import HubId, parse_id
from cutaway.checkpoints.hub_names import refuse_odd_etags, safe
from cutaway.checkpoints.progress import Progress, tqdm_class
from cutaway.errors import CutawayError, DownloadError, OfflineError, RequestError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["HubId", "fetch_file", "fetch_repo", "list_files", "parse_id"]

# What a model folder is read from; never *.bin, *.pt or *.py.
_READ = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.*",
    "vocab.json",
    "target_vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "source.spm",
    "target.spm",
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
# below a folder lie other formats of the same weights, and other models
_ELSEWHERE = ("*/*.safetensors*", "tokenizer*/*", "chat_template*/*")
_ATTEMPTS = 5
Sleep = Callable[[float], None]


def fetch_repo(
    repo_id: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    endpoint: str | None = None,
    sleep: Sleep = time.sleep,
) -> Path:
    """The snapshot folder of a repository, with the files a model is read from (which may be none).

    Args:
        repo_id: ``owner/name`` or ``owner/name@revision``.
        revision: a branch, a tag or a commit.
        offline: use the cache only; nothing is connected to.
        progress: called with bytes done, bytes in all, and a label.
        endpoint: another hub than ``HF_ENDPOINT``.
        sleep: how to wait between attempts.

    Raises:
        OfflineError: a file is not in the cache and the network may not be used.
        DownloadError: the hub gave something else than was asked; ``path`` is the file, ``field`` the address,
            ``got`` the status.
        StorageError: the cache cannot be written.
    """
    name = _named(repo_id, revision)
    return _Fetch(name, _READ, _ELSEWHERE, offline, progress, endpoint, sleep).run()


def fetch_file(
    repo_id: str,
    filename: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    endpoint: str | None = None,
    sleep: Sleep = time.sleep,
) -> Path:
    """One file of a repository, such as a ``.gguf``. Arguments and errors are those of ``fetch_repo``."""
    safe(filename)
    name = _named(repo_id, revision)
    fetch = _Fetch(name, (escape(filename),), (), offline, progress, endpoint, sleep)
    path = fetch.run() / filename
    if not path.is_file():
        there = ", ".join(fetch.listing() or ["(unknown)"])
        kind = OfflineError if is_offline(offline) else DownloadError
        raise kind("there is no such file in the repository", path=name.repo, field=filename, hint=f"it has: {there}")
    return path


def list_files(
    repo_id: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    endpoint: str | None = None,
    sleep: Sleep = time.sleep,
) -> list[str]:
    """The names of all files of a repository, as it says. Arguments and errors are those of ``fetch_repo``."""
    name = _named(repo_id, revision)
    fetch = _Fetch(name, ("config.json",), (), offline, None, endpoint, sleep)
    if not is_offline(offline):
        fetch.run()
    names = fetch.listing()
    if names is None:
        raise OfflineError(
            "the list of files is not in the cache", path=name.repo, hint="fetch the repository once with network"
        )
    return names


def _named(repo_id: str, revision: str | None) -> HubId:
    name = parse_id(repo_id)
    if name.file or name.select:
        raise RequestError("only owner/name and a revision are expected here", got=repo_id)
    if revision is not None:
        safe(revision)
        if name.revision not in (None, revision):
            raise RequestError("two revisions are given", got=repo_id, expected=revision)
    return name._replace(revision=revision or name.revision)


class _Fetch:
    """One download of what ``patterns`` match: asked for, tried again, checked, and its errors translated."""

    def __init__(
        self,
        name: HubId,
        patterns: tuple[str, ...],
        ignored: tuple[str, ...],
        offline: bool,
        progress: Progress | None,
        endpoint: str | None,
        sleep: Sleep,
    ) -> None:
        self.name = name
        self.patterns = patterns
        self.ignored = ignored
        self.offline = is_offline(offline)
        self.meter = tqdm_class(progress, name.repo)
        self.endpoint = endpoint
        self.sleep = sleep
        self.hub = _library()
        self.commit: str | None = None

    def run(self) -> Path:
        """Fetch and check; the snapshot folder, which may not exist when nothing matched."""
        for attempt in range(_ATTEMPTS):
            try:
                folder = self._snapshot()
                self._verify(folder)
                return folder
            except CutawayError:
                raise
            except Exception as error:  # whatever a hostile answer makes the library raise
                wait = None if attempt + 1 == _ATTEMPTS else wait_before_retry(error, attempt)
                if wait is None:
                    where = f"{self.name.repo}@{self.name.revision}" if self.name.revision else self.name.repo
                    raise translated(error, self.hub, where, self.offline, self._missing) from error
                self.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def listing(self) -> list[str] | None:
        """All names in the repository as its cached tree has them, or None if no tree is cached."""
        try:
            tree = self.hub.get_cached_repo_tree(self.name.repo, revision=self.commit or self.name.revision)
        except Exception:
            return None
        return sorted(file.path for file in tree)

    def _snapshot(self) -> Path:
        api = self.hub.HfApi(endpoint=self.endpoint, library_name="cutaway")
        pinned = api.resolve_revision(self.name.repo, revision=self.name.revision, local_files_only=self.offline)
        # the answer becomes a folder's name
        if not re.fullmatch(r"[0-9a-f]{40}", pinned.resolved):
            raise ValueError(f"the commit {pinned.resolved!r} is not a commit")
        self.commit = pinned.resolved
        return Path(
            self.hub.snapshot_download(
                self.name.repo,
                revision=pinned,
                local_files_only=self.offline,
                allow_patterns=list(self.patterns),
                ignore_patterns=list(self.ignored),
                tqdm_class=self.meter,
                endpoint=self.endpoint,
                library_name="cutaway",
            )
        )

    def _wants(self, name: str) -> bool:
        return any(fnmatchcase(name, p) for p in self.patterns) and not any(fnmatchcase(name, p) for p in self.ignored)

    def _verify(self, folder: Path) -> None:
        """Check every wanted file of the snapshot that was not checked before; a wrong one is taken away again."""
        seen: dict[str, str] = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            if not self._wants(name):
                continue
            if (twin := seen.setdefault(name.casefold(), name)) != name:
                raise DownloadError("two files differ in case only", path=self.name.repo, expected=twin, got=name)
            if (digest := self._digest_of(path, name)) is None or was_verified(path, digest):
                continue
            got = checksum(path, digest)
            if got != digest:
                if not self.offline:
                    _remove(path)
                raise DownloadError(
                    "the file has another checksum than the hub says",
                    path=f"{self.name.repo}/{name}",
                    expected=digest,
                    got=got,
                    hint="it was not kept; fetch it again" if not self.offline else "fetch it again with network",
                )
            note_verified(path, digest)

    def _digest_of(self, path: Path, name: str) -> str | None:
        """The checksum a file should have: its blob's name, or, where there are no links, what the hub says now."""
        if path.is_symlink():
            etag: str | None = os.path.basename(os.readlink(path))
        elif self.offline:
            return None  # it was checked when it came
        else:
            url = self.hub.hf_hub_url(self.name.repo, name, revision=self.commit, endpoint=self.endpoint)
            etag = self.hub.get_hf_file_metadata(url, endpoint=self.endpoint).etag
        if etag is None or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", etag):
            raise DownloadError(
                "the server gives no checksum for this file",
                path=f"{self.name.repo}/{name}",
                got=etag,
                hint="if HF_ENDPOINT is a mirror, it must pass on the hub's ETag",
            )
        return etag

    def _missing(self, snapshot: str | None) -> str:
        """What the cache lacks, as far as it knows."""
        names = self.listing() if snapshot else None
        if names is None or snapshot is None:
            return next((p for p in self.patterns if "*" not in p), "config.json")
        return ", ".join(n for n in names if self._wants(n) and not Path(snapshot, n).is_file())


def _library() -> "ModuleType":
    """huggingface_hub, watched. Left alone it asks its endpoint for a list of agents, offline too: telemetry."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub
    import huggingface_hub.errors

    refuse_odd_etags()
    return huggingface_hub


def _remove(path: Path) -> None:
    """Take a file and the blob behind it out of the cache."""
    blob = path.parent / os.readlink(path) if path.is_symlink() else None
    path.unlink(missing_ok=True)
    if blob is not None:
        blob.unlink(missing_ok=True)
