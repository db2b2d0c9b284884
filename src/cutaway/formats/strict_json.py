"""JSON from strangers: one meaning or an error, in bounded depth. And JSON for them."""

from __future__ import annotations

import json
import math
import re
from os import PathLike
from typing import Any, TypeAlias

from cutaway.errors import CutawayError, FormatError, LimitExceeded

__all__ = ["DEPTH", "Json", "parse_json", "pointer", "to_json"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

DEPTH = 64  # of lists and objects inside each other: what recursive readers further on can bear


def pointer(*keys: str | int) -> str:
    """The JSON pointer (RFC 6901) to a value: ``pointer("a", 0)`` is ``/a/0``."""
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


class _Twice(dict[str, Any]):
    """An object that had a key twice; it stands in the tree until its pointer is known."""

    key = ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    twice = _Twice(made)
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            twice.key = key
            break
        seen.add(key)
    return twice


def _find_twice(root: Any) -> str | None:
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        where, value = stack.pop()
        if isinstance(value, _Twice):
            return where + pointer(value.key)
        if isinstance(value, dict):
            stack.extend((where + pointer(key), child) for key, child in value.items())
        elif isinstance(value, list):
            stack.extend((where + pointer(i), child) for i, child in enumerate(value))
    return None


def _deeper_than(depth: int, tree: Any) -> bool:
    level = [tree]
    for _ in range(depth):
        boxes = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        level = [child for box in boxes for child in box if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def parse_json(
    data: bytes, *, path: str | PathLike[str], limit: int, error: type[CutawayError] = FormatError, offset: int = 0
) -> Json:
    """Strict JSON (RFC 8259): UTF-8 without BOM, no key twice, no NaN or infinity, bounded depth.

    ``offset`` is where ``data`` starts in the file. Errors: LimitExceeded past ``limit`` bytes,
    else ``error`` with the byte offset, or the pointer of the doubled key.
    """
    if len(data) > limit:
        raise LimitExceeded("JSON is too large", path=path, expected=f"at most {limit} bytes", got=len(data))
    if data.startswith(b"\xef\xbb\xbf"):
        raise error("starts with a byte order mark", path=path, offset=offset, expected="JSON in plain UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as bad:
        raise error("is not UTF-8", path=path, offset=offset + bad.start) from bad

    def refuse_number(literal: str) -> float:
        words = re.finditer(r'"(?:[^"\\]|\\.)*"|-?[\w.+-]+', text, re.DOTALL)
        start = next((word.start() for word in words if word.group() == literal), None)
        at = None if start is None else offset + len(text[:start].encode())
        raise error("number is not finite", path=path, offset=at, got=literal)

    def finite(literal: str) -> float:
        value = float(literal)
        return value if math.isfinite(value) else refuse_number(literal)

    twice = False

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        made = _unique(pairs)
        twice = twice or isinstance(made, _Twice)
        return made

    try:
        tree: Json = json.loads(text, object_pairs_hook=unique, parse_constant=refuse_number, parse_float=finite)
    except json.JSONDecodeError as bad:
        at = offset + len(text[: bad.pos].encode())
        raise error(f"is not JSON: {bad.msg}", path=path, offset=at) from bad
    except RecursionError as bad:
        raise error("JSON is nested too deeply", path=path, offset=offset) from bad
    except ValueError as bad:  # an integer of thousands of digits
        raise error("number is too long", path=path) from bad
    if _deeper_than(DEPTH, tree):
        raise error("JSON is nested too deeply", path=path, offset=offset, expected=f"at most {DEPTH} levels")
    if twice:
        raise error("key stands twice in one object", path=path, field=_find_twice(tree))
    # An escaped half of a surrogate pair is grammatical, but no text: it could never be written again.
    if re.search(rb"\\u[dD][89a-fA-F]", data):
        try:
            json.dumps(tree, ensure_ascii=False).encode()
        except UnicodeEncodeError as bad:
            raise error("holds half a surrogate pair", path=path) from bad
    return tree


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: NaN and infinity, which it cannot say, become null."""
    return json.dumps(_finite(value), ensure_ascii=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
