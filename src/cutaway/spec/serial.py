"""A spec as plain JSON and back, with nothing taken on trust.

Every dataclass is an object of its fields, all of them written out. Where a field may hold one of several kinds, the
object says which under ``"type"``: ``{"type": "alibi", …}``. Layers that are equal are written once::

    "decoder": {"blocks": [{…}, {…}], "layers": [0, 0, 1, 0, 0, 1], "norm": {…}}
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cutaway.errors import ConfigError, LimitExceeded
from cutaway.spec.block import BlockSpec
from cutaway.spec.check import MOST_LAYERS, check
from cutaway.spec.model import ModelSpec, StackSpec

__all__ = ["difference", "read", "spec_from_json", "spec_to_json", "tag"]

T = TypeVar("T")
TYPE = "type"
_APART = "kept"  # keys of somebody else's config: no part of the model


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    """All of a spec but what it keeps of a config."""
    made: dict[str, Any] = _plain(spec)
    del made[_APART]
    return made


def spec_from_json(values: object) -> ModelSpec:
    """The inverse of :func:`spec_to_json`, checked.

    Raises:
        ConfigError: a field is unknown, missing, of a wrong type or out of range; with its JSON pointer.
        LimitExceeded: more layers or rows than any model has.
    """
    if isinstance(values, dict) and _APART in values:
        raise ConfigError("unknown field", field=f"/{_APART}")
    spec = read(ModelSpec, values)
    check(spec)
    return spec


def tag(kind: type) -> str:
    """
    >>> from cutaway.spec import AlibiBias, Llama3Scaling, MoeSpec
    >>> tag(AlibiBias), tag(Llama3Scaling), tag(MoeSpec)
    ('alibi', 'llama3', 'moe')
    """
    return re.sub("(Spec|Bias|Positions|Scaling)$", "", kind.__name__).lower()


# ---- out ---------------------------------------------------------------------------------------------------


def _plain(value: Any, tagged: bool = False) -> Any:
    if isinstance(value, StackSpec):
        blocks = list(dict.fromkeys(value.layers))
        places = {block: i for i, block in enumerate(blocks)}
        return {
            "blocks": [_plain(block) for block in blocks],
            "layers": [places[layer] for layer in value.layers],
            "norm": _plain(value.norm),
            "dropout": value.dropout,
        }
    if is_dataclass(value):
        kind: Any = type(value)
        hints = _hints(kind)
        made: dict[str, Any] = {TYPE: tag(kind)} if tagged else {}
        return made | {f.name: _plain(getattr(value, f.name), len(_kinds(hints[f.name])) > 1) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# ---- in ----------------------------------------------------------------------------------------------------


def read(kind: type[T], value: object, at: str = "", /, **defaults: Any) -> T:
    """A dataclass of the spec from JSON; ``defaults`` stand in for fields that are left out.

    Raises:
        ConfigError: see :func:`spec_from_json`.
    """
    if not isinstance(value, Mapping):
        raise ConfigError("not an object", field=at, expected="an object", got=value)
    if kind is StackSpec:
        return cast(T, _stack(value, at))
    known: dict[str, Field[Any]] = {f.name: f for f in fields(cast(Any, kind))}
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise ConfigError("unknown field", field=f"{at}/{key}", got=value[key], hint=hint)
    made: dict[str, Any] = {}
    for name, f in known.items():
        if name in value:
            made[name] = _value(_hints(cast(Any, kind))[name], value[name], f"{at}/{name}")
        elif name in defaults:
            made[name] = defaults[name]
        elif f.default is MISSING:
            raise ConfigError("missing", field=f"{at}/{name}")
    return kind(**made)


def _stack(value: Mapping[str, Any], at: str) -> StackSpec:
    for key in value:
        if key not in ("blocks", "layers", "norm", "dropout"):
            wanted = "blocks, layers, norm, dropout"
            raise ConfigError("unknown field", field=f"{at}/{key}", expected=wanted, got=value[key])
    order = value.get("layers")
    if isinstance(order, list) and len(order) > MOST_LAYERS:
        raise LimitExceeded(
            "more layers than any model has", field=f"{at}/layers", expected=f"≤ {MOST_LAYERS}", got=len(order)
        )
    blocks: tuple[BlockSpec, ...] = _value(tuple[BlockSpec, ...], value.get("blocks"), f"{at}/blocks")
    numbers: tuple[int, ...] = _value(tuple[int, ...], order, f"{at}/layers")
    for i, number in enumerate(numbers):
        if not 0 <= number < len(blocks):
            raise ConfigError("no such block", field=f"{at}/layers/{i}", expected=f"0…{len(blocks) - 1}", got=number)
    if len({*numbers}) < len(blocks):
        raise ConfigError("some blocks are of no layer", field=f"{at}/blocks", expected=len({*numbers}))
    norm = _value(_hints(StackSpec)["norm"], value.get("norm"), f"{at}/norm")
    dropout = _value(float, value.get("dropout", 0.0), f"{at}/dropout")
    return StackSpec(tuple(blocks[number] for number in numbers), norm, dropout)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _kinds(annotation: Any) -> tuple[type, ...]:
    """The dataclasses that a field may hold."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(option for option in options if is_dataclass(option) and isinstance(option, type))


def _value(annotation: Any, value: Any, at: str) -> Any:
    """One value of a field's type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        options = [option for option in arguments if option is not NoneType]
        return _value(options[0], value, at) if len(options) == 1 else _one_of(_kinds(annotation), value, at)
    if origin is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise ConfigError("unknown value", field=at, expected=" or ".join(map(str, arguments)), got=value)
        return value
    if origin is tuple:
        return _sequence(arguments, value, at)
    if is_dataclass(annotation) and isinstance(annotation, type):
        return read(annotation, value, at)
    return _simple(annotation, value, at)


def _one_of(kinds: tuple[type, ...], value: Any, at: str) -> Any:
    by_tag = {tag(kind): kind for kind in kinds}
    if not isinstance(value, Mapping):
        raise ConfigError("not an object", field=at, expected=" or ".join(by_tag), got=value)
    name = value.get(TYPE)
    if not isinstance(name, str) or name not in by_tag:
        raise ConfigError("unknown value", field=f"{at}/{TYPE}", expected=" or ".join(by_tag), got=name)
    return read(by_tag[name], {key: item for key, item in value.items() if key != TYPE}, at)


def _sequence(arguments: tuple[Any, ...], value: Any, at: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError("not a list", field=at, expected="a list", got=value)
    return tuple(_value(arguments[0], item, f"{at}/{i}") for i, item in enumerate(value))


def _simple(kind: type, value: Any, at: str) -> Any:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if math.isfinite(value):
            return value
        raise ConfigError("is not finite", field=at, expected=words[kind], got=value)
    if type(value) is not kind:
        raise ConfigError("of a wrong type", field=at, expected=words[kind], got=value)
    return value


# ---- comparing ---------------------------------------------------------------------------------------------


def difference(one: Any, two: Any, at: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two specs differ, and what stands there in each; None where they are equal."""
    if one == two:
        return None
    if is_dataclass(one) and type(one) is type(two):
        for f in fields(one):
            found = difference(getattr(one, f.name), getattr(two, f.name), f"{at}/{f.name}")
            if found is not None:
                return found
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            found = difference(a, b, f"{at}/{i}")
            if found is not None:
                return found
    return at or "/", one, two
