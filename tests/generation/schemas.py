"""Random JSON schemas of growing size, and an oracle (the jsonschema library) for what is written under them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema

from cutaway.generation.generate import Generation

NAMES = ["a", "b c", 'q"', "é", "🙂", "long_name", "", "$ref", "items", "\\", "0"]
FORMATS = ("date", "uuid", "ipv4")
VALUES = ["x", 'y"z', 3, None, True, "é\n", 2.5, [1, "a"], {"k": []}, -0.125, "", [], "日本🙂"]


class Schemas:
    """Makes schemas whose answers end by themselves.

    Args:
        chance: where choices come from.
        size: about how many parts one has.
    """

    def __init__(self, chance: random.Random, size: int) -> None:
        self._chance = chance
        self._left = size
        self._definitions: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        """A schema with its definitions."""
        root = self._any(0)
        if not self._definitions:
            return root
        # What stands beside $ref counts too, so definitions may lie on any root.
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": self._definitions}

    def _any(self, depth: int) -> dict[str, Any]:
        self._left -= 1
        kinds = [self._string, self._number, self._integer, self._fixed, self._plain]
        if self._left > 0 and depth < 6:
            kinds += [self._object, self._object, self._array, self._array, self._either, self._reference]
            kinds = kinds if depth else kinds[5:]
        made = self._chance.choice(kinds)(depth)
        if self._chance.random() < 0.15:
            made = {"title": "anything", "description": 'a "note"', **made}
        return self._nullable(made) if self._chance.random() < 0.2 else made

    def _nullable(self, made: dict[str, Any]) -> dict[str, Any]:
        kind = made.get("type")
        if isinstance(kind, str) and kind != "null" and self._chance.random() < 0.5:
            return {**made, "type": [kind, "null"]}
        return {"anyOf": [made, {"type": "null"}]}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._chance.sample(NAMES, min(self._chance.randint(0, 5), max(self._left, 0)))
        required = self._chance.sample(names, self._chance.randint(0, len(names)))
        properties = {name: self._any(depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> dict[str, Any]:
        if self._chance.random() < 0.3:
            items = [self._any(depth + 1) for _ in range(self._chance.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        low = self._chance.randint(0, 2)
        high = low + self._chance.randint(0, 2)
        return {"type": "array", "items": self._any(depth + 1), "minItems": low, "maxItems": high}

    def _string(self, depth: int) -> dict[str, Any]:
        kind = self._chance.random()
        if kind < 0.3:
            pattern = self._chance.choice(
                ["^[a-f]{2,5}-[0-9]{1,3}$", "^(yes|no)$", "^[^x]{1,4}$", r"^\d\d:\d\d$", "^é?🙂$"]
            )
            return {"type": "string", "pattern": pattern}
        if kind < 0.45:
            return {"type": "string", "format": self._chance.choice(FORMATS)}
        low = self._chance.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._chance.randint(0, 6)}

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self._chance.choice([-(10**12), -200, -1, 0, 7, 999])
        high = low + self._chance.choice([0, 1, 9, 5000, 10**10])
        if high > low and self._chance.random() < 0.3:
            return {"type": "integer", "exclusiveMinimum": low, "maximum": high}
        bounds = {"type": "integer", "minimum": low, "maximum": high}
        return {**bounds, "multipleOf": 5} if high >= low + 5 and self._chance.random() < 0.3 else bounds

    def _number(self, depth: int) -> dict[str, Any]:
        low = self._chance.choice([-1000.5, -1, 0, 0.25, 3.75])
        high = low + self._chance.choice([0.5, 1.25, 100, 12345.5])
        if high >= low + 1 and self._chance.random() < 0.4:  # shorter ones are refused, see bounds.py
            return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        return {"type": "number", "minimum": low, "maximum": high}

    def _fixed(self, depth: int) -> dict[str, Any]:
        if self._chance.random() < 0.3:
            return {"const": self._chance.choice(VALUES)}
        return {"enum": self._chance.sample(VALUES, self._chance.randint(1, 5))}

    def _plain(self, depth: int) -> dict[str, Any]:
        return {"type": self._chance.choice(["boolean", "null"])}

    def _either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth + 1) for _ in range(self._chance.randint(2, 3))]}

    def _reference(self, depth: int) -> dict[str, Any]:
        """To something defined, which may hold itself, at most once in each part."""
        if self._definitions and self._chance.random() < 0.5:
            return {"$ref": f"#/$defs/{self._chance.choice(list(self._definitions))}"}
        made = self._any(depth + 1)
        name = f"d{len(self._definitions)}"
        if self._chance.random() < 0.4:
            again = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
            made = {
                "type": "object",
                "properties": {"value": made, "next": again},
                "required": ["value"],
                "additionalProperties": False,
            }
        self._definitions[name] = made
        return {"$ref": f"#/$defs/{name}"}


def finished(answer: Generation, schema: dict[str, Any]) -> bool:
    """Whether an answer came to its end; it is then JSON, and valid."""
    if answer.finish_reason != "stop":
        return False
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(FORMATS))
    errors = [error.message for error in validator.iter_errors(json.loads(answer.text))]
    assert not errors, (errors, answer.text, json.dumps(schema))
    return True


def check_schemas(answer: Callable[[dict[str, Any], int], Generation], count: int, seed: int) -> int:
    """So many random schemas, the last of about thirty parts; gives how many answers came to their end.

    Args:
        answer: to a schema, with a seed.
    """
    chance, ended, longest = random.Random(seed), 0, 0
    for number in range(count):
        schema = Schemas(chance, 1 + 30 * number // count).whole()
        jsonschema.Draft202012Validator.check_schema(schema)
        ended += finished(answer(schema, number), schema)
        longest = max(longest, len(json.dumps(schema)))
    print(f"\n{ended} of {count} answers came to their end and are valid; the longest schema has {longest} characters")
    return ended
