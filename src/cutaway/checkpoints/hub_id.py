"""A hub name taken apart."""

from __future__ import annotations

import re
from typing import NamedTuple

from cutaway.checkpoints.hub_names import safe
from cutaway.errors import RequestError

__all__ = ["HubId", "parse_id"]

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_ID = re.compile(
    rf"(?P<repo>{_PART}/{_PART}|{_PART}(?!/))(?:/(?P<file>[^@:\\]+))?(?::(?P<select>[\w.-]+))?(?:@(?P<revision>[\w./+-]+))?",
    re.ASCII,
)


class HubId(NamedTuple):
    """A hub name taken apart: ``owner/name[/file][:select][@revision]``."""

    repo: str
    revision: str | None = None
    file: str | None = None
    select: str | None = None


def parse_id(text: str) -> HubId:
    """Take a hub name apart.

    >>> parse_id("owner/name@v1.0")
    HubId(repo='owner/name', revision='v1.0', file=None, select=None)
    >>> parse_id("owner/name:Q4_K_M").select, parse_id("owner/name/a.gguf").file
    ('Q4_K_M', 'a.gguf')

    Raises:
        RequestError: this cannot be the name of a hub repository.
    """
    found = _ID.fullmatch(text)
    if not found or len(found["repo"]) > 96 or any(bad in found["repo"] for bad in ("--", "..")):
        raise RequestError("this is not a hub name", got=text, expected="owner/name, owner/name@revision")
    if found["file"]:
        safe(found["file"])
    if found["revision"]:
        safe(found["revision"])
    return HubId(found["repo"], found["revision"], found["file"], found["select"])
