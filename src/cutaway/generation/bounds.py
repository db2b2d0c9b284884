"""What a form may ask of llguidance: native code, where the end of the stack or of memory ends the whole process.

Measured with llguidance 1.9.1: a level of a schema takes 9 kB of stack, one of a grammar up to 8; expressions that one
text must match together take memory that doubles with each (12: 20 MB; 16: 490 MB); numbers go through fp64.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

from cutaway.errors import RequestError, ResourceError

T = TypeVar("T")
Node: TypeAlias = Mapping[str, Any]

STACK = 256 << 20  # bytes for reading a form, in a thread of its own; only what is used is ever taken
LEVELS = 12_000  # of a schema, one in another through references
RULES = 1_000  # of a grammar, with brackets; repetitions one in another take time by the third power: here, seconds
TOGETHER = 10  # expressions that one text must match
VISITS = 200_000  # of parts of a schema, in finding out
PROPERTIES = 5_000  # of one object: their time grows by the second power, to two seconds here
WHOLE = 2**53  # whole numbers up to here are themselves in fp64
ENDS = (2**63 - 1, 2**64 - 1)  # upper bounds of common integers; llguidance keeps to the first for either

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name → schema
_VALUES = ("const", "enum", "default", "examples")  # no schemas are in there
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_lock = threading.Lock()

# A changed parameter of a Lark rule, and the only place for one: after a text, so that each token sees few of its 2^64.
_CHANGED = re.compile(r"::(?!\s*[0-9_])\s*\w*")
_AFTER_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)+"i?[ \t]+\w+::\w+')
# White space of JSON as an expression; llguidance takes any as a schema's own, and the answer would be no JSON.
_ONE = r"(?:[ \t\n\r]|\\[tnr]|\\x(?:20|0[9aAdD]))"
_SPACE = rf"(?:(?:{_ONE}|\[{_ONE}+\])(?:[*+?]|\{{[0-9]{{1,4}}(?:,[0-9]{{0,4}})?\}})?)*"
_SPACES = {"whitespace_pattern": _SPACE, "item_separator": f"{_SPACE},{_SPACE}", "key_separator": f"{_SPACE}:{_SPACE}"}


def with_room(call: Callable[[], T]) -> T:
    """What a call gives back or raises, run with a stack of STACK bytes.

    Raises:
        ResourceError: there is no room for that.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="cutaway-form")
    with _lock:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        except RuntimeError as error:
            raise ResourceError("no memory for a thread that reads the form", expected=f"{STACK} bytes") from error
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def check_grammar(text: str) -> None:
    """Refuse a grammar that llguidance would not come back from.

    Raises:
        RequestError: what is too much.
    """
    if text.lstrip().startswith("{"):  # llguidance would take it for a form in its own JSON
        raise RequestError("is no Lark", field="grammar", hint="A JSON schema is given as schema.")
    rest, start = "", 0
    for found in re.finditer(r"%json\s*(?=\{)", text):
        if found.start() >= start:
            rest += text[start : found.end()]
            try:
                tree, start = json.JSONDecoder().raw_decode(text, found.end())
            except (ValueError, RecursionError) as error:
                raise RequestError("%json is followed by no JSON", field="grammar") from error
            check_schema(tree, "grammar")
    rest += text[start:]
    levels = rest.count(":") + sum(map(rest.count, "([{"))  # a rule has a colon, and what is inside one has a bracket
    if levels > RULES:
        raise _too_much("grammar", "rules and brackets", RULES, levels)
    if rest.count("&") > TOGETHER:
        raise _too_much("grammar", "expressions that must match together", TOGETHER, rest.count("&"))
    if changed := _CHANGED.search(_AFTER_TEXT.sub("", rest)):
        hint = 'Write a text in quotes right before the rule: "a" rule::incr(_).'
        raise RequestError("a parameter changes where no text was", field="grammar", got=changed[0], hint=hint)


def check_regex(text: str, field: str = "regex") -> None:
    """Refuse half an escape at the end, which llguidance would leave out.

    Raises:
        RequestError: there is one.
    """
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise RequestError("ends in half an escape", field=field, got=text[-9:])


def check_guidance(tree: Node) -> None:
    """Refuse separators of a schema's own that would make its answers something else than JSON.

    Raises:
        RequestError: which.
    """
    own = dict(_named(tree, "x-guidance"))
    for key in _SPACES.keys() & own.keys():
        if not (isinstance(own[key], str) and re.fullmatch(_SPACES[key], own[key])):
            raise RequestError(f"{key} lets in what is no JSON", field="schema", got=own[key])


def check_schema(tree: Node, field: str = "schema") -> None:
    """Refuse a schema that llguidance would get wrong, or would not come back from.

    Raises:
        RequestError: what is too much, or which number it is.
    """
    nodes = [*_schemas(tree)]
    references = {ref for node, _ in nodes if isinstance(ref := node.get("$ref"), str)}
    levels = min(len(nodes), len(references) * max(depth for _, depth in nodes))
    if levels > LEVELS:
        raise _too_much(field, "levels through references", LEVELS, levels)
    for node, _ in nodes:
        _check_numbers(node, field)
        for text in (node.get("pattern"), *(name for name, _ in _named(node, "patternProperties"))):
            if isinstance(text, str):
                check_regex(text, field)
    joined = any("allOf" in node or ("$ref" in node and len(node) > 1) for node, _ in nodes)
    for group in _together(tree, [node for node, _ in nodes], field) if joined else ([node] for node, _ in nodes):
        _check_group(group, field)


def _too_much(field: str, what: str, most: int, got: int) -> RequestError:
    return RequestError(f"too many {what}", field=field, expected=f"at most {most}", got=got)


def _schemas(tree: Node) -> Iterator[tuple[Node, int]]:
    """Every part that may be a schema, and how deep it lies."""
    waiting: list[tuple[Any, int]] = [(tree, 1)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, Mapping):
            yield part, depth
            for key, value in part.items():
                if key in _NAMED and isinstance(value, Mapping):
                    waiting += [(one, depth + 1) for one in value.values()]
                elif key not in _VALUES:
                    waiting.append((value, depth + 1))
        elif isinstance(part, list):
            waiting += [(one, depth) for one in part]


def _number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_numbers(node: Node, field: str) -> None:
    """Bounds and values that are others in fp64, or past llguidance's 64 bits."""
    for key in (*_LOW, *_HIGH):
        value = node.get(key)
        if not _number(value) or (key in _HIGH and value in ENDS):
            continue
        if abs(value) > 2**63 or float(value) != value:
            raise RequestError(f"{key} is a number that cannot be kept exactly", field=field, got=value)
    waiting = [node.get("const"), node.get("enum")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif _number(value) and abs(value) > WHOLE:
            raise RequestError("a value is a number that cannot be kept exactly", field=field, got=value)


def _check_group(group: Sequence[Node], field: str) -> None:
    """What may hold for one value: so many expressions; and no range that begins at a whole number which is not in it.

    In a range that is shorter than one, llguidance takes such a number for a part of it: 10 for one of 10 < x ≤ 10.5.
    """
    texts = {(key, text) for node in group for key in ("pattern", "format") if isinstance(text := node.get(key), str)}
    if len(texts) > TOGETHER:
        raise _too_much(field, "patterns and formats that may hold for one text", TOGETHER, len(texts))
    names = {name for node in group for name in (*dict(_named(node, "properties")), *_required(node))}
    if len(names) > PROPERTIES:
        raise _too_much(field, "properties that may hold for one object", PROPERTIES, len(names))
    for (open_, ends), sign in ((("exclusiveMinimum", _HIGH), 1), (("exclusiveMaximum", _LOW), -1)):
        borders = [value for node in group if _number(value := node.get(open_)) and value == int(value)]
        others = [value for node in group for key in ends if _number(value := node.get(key))]
        for border in borders:
            if border * sign >= 0 and any(0 < (other - border) * sign < 1 for other in others):
                hint = f"Give {open_[len('exclusive') :].lower()}, a little {'above' if sign > 0 else 'below'} it."
                raise RequestError(f"{open_} cannot be kept in a range this short", field=field, got=border, hint=hint)


def _together(tree: Node, nodes: Sequence[Node], field: str) -> Iterator[list[Node]]:
    """For each name of a property, for items and for the whole: all schemas that may hold for one such value."""
    slots: dict[str | None, list[Any]] = {None: [tree], "": []}
    everywhere: list[Any] = []
    for node in nodes:
        for name, child in _named(node, "properties"):
            slots.setdefault("." + name, []).append(child)
        everywhere += [child for _, child in _named(node, "patternProperties")]
        everywhere.append(node.get("additionalProperties"))
        for key in ("items", "prefixItems", "additionalItems"):
            slots[""] += value if isinstance(value := node.get(key), list) else [value]
    visits = 0
    for children in (*slots.values(), everywhere):
        found: dict[int, Node] = {}
        waiting = [*children, *everywhere]
        while waiting:
            visits += 1
            if visits > VISITS:
                raise _too_much(field, "parts that may hold together", VISITS, visits)
            part = waiting.pop()
            if not isinstance(part, Mapping) or id(part) in found:
                continue
            found[id(part)] = part
            for key in ("allOf", "anyOf", "oneOf"):
                waiting += value if isinstance(value := part.get(key), list) else []
            if isinstance(ref := part.get("$ref"), str):
                target = _target(tree, ref)
                waiting += nodes if target is None else [target]
        yield [*found.values()]


def _named(node: Node, key: str) -> Iterator[tuple[str, Any]]:
    value = node.get(key)
    return iter(value.items()) if isinstance(value, Mapping) else iter(())


def _required(node: Node) -> Iterator[str]:
    value = node.get("required")
    return (name for name in value if isinstance(name, str)) if isinstance(value, list) else iter(())


def _target(tree: Any, ref: str) -> Any:
    """Where a reference leads, if it says so by the way there."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    for name in ref.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(tree, Mapping):
            tree = tree.get(name)
        else:  # so few digits that no list is longer, and that Python reads them
            place = int(name) if name.isdecimal() and len(name) < 9 else -1
            tree = tree[place] if isinstance(tree, list) and 0 <= place < len(tree) else None
    return tree
