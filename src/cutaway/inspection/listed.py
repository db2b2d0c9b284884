"""A list where a list is wanted: a text alone would be taken for a list of letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cutaway.errors import RequestError
from cutaway.generation.inputs import plain


def listed(field: str, given: Any, of: str) -> list[Any]:
    """What is given, as a list.

    Args:
        field: what an error calls it.
        given: a list, or whatever else has several things in it.
        of: words for what should be in it.

    Raises:
        RequestError: one thing alone, a text, or names with something each.
    """
    found = plain(given)
    if isinstance(found, Iterable) and not isinstance(found, (str, bytes, Mapping)):
        return list(found)
    hint = None if given is None else f"One alone goes into a list too: {field}=[…]."
    raise RequestError("not a list", field=field, expected=f"a list of {of}", got=repr(given), hint=hint)


def names_listed(field: str, given: Any) -> list[str]:
    """Names or patterns of quantities, as a list.

    Raises:
        RequestError: something else, or something in it that is no text.
    """
    found = listed(field, given, "names or patterns")
    for place, name in enumerate(found):
        if not isinstance(name, str):
            hint = "Give the names one after another." if isinstance(name, (list, tuple)) else None
            raise RequestError("not a name", field=f"{field}/{place}", expected="a text", got=name, hint=hint)
    return found
