"""huggingface_hub's failures: which are worth another attempt, and what they are in cutaway's words."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cutaway.errors import CutawayError, DownloadError, OfflineError, StorageError

__all__ = ["translated", "wait_before_retry"]

_LONGEST_WAIT = 120.0  # a server that wants us to wait longer is told of instead
_BUSY = (408, 429, 500, 502, 503, 504)


def translated(
    error: Exception, hub: Any, where: str, offline: bool, missing: Callable[[str | None], str]
) -> CutawayError:
    """The library's exception as one of ours.

    Args:
        error: what it raised.
        hub: the library.
        where: the repository, for the message.
        offline: whether the network may be used.
        missing: snapshot folder → the names that it lacks.
    """
    if (full := _disk_full(error)) is not None:
        hint = "free some space, or set HF_HUB_CACHE to a folder with more"
        return StorageError("the hub's cache cannot be written", path=where, got=full, hint=hint)
    errors = hub.errors
    cause = _cause(error)
    response = getattr(cause, "response", None)
    if isinstance(cause, errors.HfHubHTTPError) and response is not None:
        status = int(response.status_code)
        what, hint = _explained(status, response.headers)
        return DownloadError(what, path=where, field=_address(response), got=f"HTTP {status}", hint=hint)
    if isinstance(error, errors.LocalEntryNotFoundError | errors.RevisionResolutionError):
        if offline or isinstance(cause, errors.OfflineModeIsEnabled):
            return OfflineError(
                "not in the hub's cache, and the network may not be used",
                path=where,
                field=missing(getattr(error, "snapshot_path", None)),
                hint="fetch it once with network (without --offline and HF_HUB_OFFLINE)",
            )
        return DownloadError(
            "the hub cannot be reached",
            path=where,
            field=_address(cause),
            got=f"{type(cause).__name__}: {_line(cause)}",
            hint="look at the network, the proxy, and HF_ENDPOINT",
        )
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError):
        file = cause.filename if isinstance(cause.filename, str) else where
        return StorageError("the hub's cache cannot be used", path=file, got=cause.strerror, hint="see HF_HUB_CACHE")
    return DownloadError(
        "the hub gave an answer that makes no sense",
        path=where,
        field=_address(cause),
        got=f"{type(cause).__name__}: {_line(cause)}",
        hint="if a login page or a proxy stands between, get past it and try again",
    )


def _disk_full(error: BaseException | None) -> str | None:
    """What the system said, where a full disk is somewhere behind an error; hf_xet has it as text only."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (found := re.search(r"\(os error (\d+)\)", str(error))):
            number = int(found[1])
        if number in (errno.ENOSPC, errno.EDQUOT):
            return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None


def _cause(error: BaseException) -> BaseException:
    """What the library's "not found locally" hides."""
    hides = type(error).__name__ in {"LocalEntryNotFoundError", "IncompleteSnapshotError", "RevisionResolutionError"}
    return error.__cause__ if hides and error.__cause__ is not None else error


def wait_before_retry(error: Exception, attempt: int) -> float | None:
    """Seconds to wait before another attempt; None if it would not help, or the library made enough of them."""
    cause = _cause(error)
    if (response := getattr(cause, "response", None)) is not None:
        status, request = response.status_code, response.request
        made = request.method == "HEAD" or "/tree/" in request.url.path
        made = made or (status in (408, 429) and "/api/" not in request.url.path)
        if made or status not in _BUSY:
            return None
        after = response.headers.get("retry-after", "")
        wait = float(after) if after.isdecimal() else float(2**attempt)
        return wait if wait <= _LONGEST_WAIT else None
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    broken = "NetworkError" in kinds and "ConnectError" not in kinds
    # a body that ends early it resumed until it gave up, a listing it did not
    broken = broken or ("RemoteProtocolError" in kinds and "/api/" in (_address(cause) or ""))
    wrong_size = "Consistency check failed" in str(cause)
    return float(2**attempt) if broken or wrong_size else None


def _explained(status: int, headers: Any) -> tuple[str, str]:
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    if headers.get("x-error-code") == "GatedRepo":
        return "this repository is gated", f"accept its terms on its page, then {log_in}"
    if status in (401, 403):
        return "the hub refuses access", f"check the name; if the repository is private or gated, {log_in}"
    if status == 404:
        return "the hub does not have this", "check the name and the revision"
    if status == 429:
        after = headers.get("retry-after")
        return "the hub asks for fewer requests", f"try again in {after} s" if after else "try again later"
    if status >= 500:
        return "the hub is in trouble", "try again later"
    return "the hub refuses the request", "check the name"


def _address(about: Any) -> str | None:
    """The address a response or an error is about, without the query: it may be signed."""
    try:
        parts = urlsplit(str(about.request.url))
    except (AttributeError, RuntimeError, ValueError):  # there is none, or httpx does not know it
        return None
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return re.sub(r"\?\S+", "?…", lines[0])
