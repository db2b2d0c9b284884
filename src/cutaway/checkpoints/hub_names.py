"""Names that people or servers choose and that become files: refused where they could leave their folder.

huggingface_hub makes of a server's ETag the name of a blob, of its lock and of its unfinished file, and does not look
at it. So its answers are looked at here, before it sees them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

from cutaway.errors import DownloadError, RequestError

__all__ = ["refuse_odd_etags", "safe"]

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_LOCK = Lock()


def safe(name: str) -> None:
    """Refuse what could leave a folder on any system, whoever chose it.

    Raises:
        RequestError: it could.
    """
    parts = name.split("/")
    if not name.isprintable() or any(c in name for c in '\\:*?"<>|') or any(p in ("", ".", "..") for p in parts):
        raise RequestError("this name could leave its folder", got=name)


def refuse_odd_etags() -> None:
    """From now on, every answer to huggingface_hub is looked at; one with an odd ETag is a DownloadError.

    Its clients are made by a factory, and anew after some failures; so it is the factory that is taken over. A person's
    own stays in use, within ours.
    """
    from huggingface_hub.utils import _http as http

    with _LOCK:
        if not isinstance(http._GLOBAL_CLIENT_FACTORY, _Watched):
            http.set_client_factory(_Watched(http._GLOBAL_CLIENT_FACTORY))


class _Watched:
    """A factory of clients whose answers are looked at."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory

    def __call__(self) -> Any:
        client = self._factory()
        client.event_hooks["response"].append(_look)
        return client


def _look(response: Any) -> None:
    """Called with every answer, before its body is read.

    Raises:
        DownloadError: it would name a file oddly.
    """
    for etag in _etags(response):
        if not _PLAIN.fullmatch(etag):
            raise DownloadError(
                "the server gives a checksum that could leave its folder",
                path=str(response.request.url.path),
                field="ETag",
                got=etag,
                hint="do not trust it; if HF_ENDPOINT is a mirror, use another",
            )


def _etags(response: Any) -> Iterator[str]:
    """What an answer says that becomes a file's name: headers of a HEAD, and checksums in a list of files."""
    if response.request.method == "HEAD":
        for header in ("x-linked-etag", "etag"):
            if (etag := response.headers.get(header)) is not None:
                yield etag.lstrip("W/").strip('"')  # as the library does it
    elif "/tree/" in response.request.url.path and response.status_code == 200:
        response.read()
        try:
            entries = response.json()
        except ValueError:
            return  # the library will say so
        for entry in entries if isinstance(entries, list) else []:
            large = entry.get("lfs") if isinstance(entry, dict) else None
            if isinstance(large, dict) and "oid" in large:
                yield str(large["oid"])
