"""Paths as people give them."""

from __future__ import annotations

import os
from typing import Any

from cutaway.errors import RequestError, StorageError


def usable_path(path: Any, field: str = "path", wanted: str = "a text or a pathlib.Path") -> str:
    """A path that some file could have, as a text.

    Raises:
        RequestError: something else than a path, or none at all.
        StorageError: no system has such: it holds a NUL, or half a character.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise RequestError("not a path", field=field, expected=wanted, got=path)
    try:
        usable = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise StorageError("is not a usable path", path=ascii(text)[1:-1])
    return text
