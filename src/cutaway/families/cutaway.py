"""cutaway's own format: the spec itself in config.json, and tensors under the model's own names.

::

    {"model_type": "cutaway", "format": 1, "dtype": "float32", "spec": {…}, "kept": ["eos_token_id"], "eos_token_id": 2}

It holds any model, of whatever family; ``kept`` names the keys of another config that change no number here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutaway.errors import ConfigError, LimitExceeded
from cutaway.families.family import Family
from cutaway.families.registry import known_families
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import WeightRule, rename
from cutaway.spec import ModelSpec
from cutaway.spec.parameters import parameter_shapes
from cutaway.spec.serial import spec_from_json, spec_to_json

FORMAT = 1


def read(c: ConfigReader) -> ModelSpec:
    """A ``config.json`` of this format as a spec."""
    c.raw("model_type", None)
    c.integer("format", low=FORMAT, high=FORMAT)
    values, kept = c.raw("spec"), c.raw("kept", [])
    if not isinstance(kept, list) or not all(isinstance(key, str) for key in kept):
        raise c.error("kept", "not a list of keys", expected="a list of text", got=kept)
    own = {"model_type", "format", "spec", "kept"} & {*kept}
    if own:
        raise c.error("kept", "names what is read", got=sorted(own))
    c.keep(*kept)
    if "dtype" not in kept:
        c.raw("dtype", None)
    try:
        spec = spec_from_json(values)
    except (ConfigError, LimitExceeded) as error:
        at = c.error(f"spec{error.field or ''}", "").field
        found = type(error)(error.what, path=c.path, field=at, expected=error.expected, got=error.got, hint=error.hint)
        raise found from error
    families = [*known_families(), "cutaway"]
    if spec.family not in families:
        raise c.error("spec/family", "unknown value", expected=" or ".join(families), got=spec.family)
    return replace(spec, kept=c.finish())


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    return {"format": FORMAT, "spec": spec_to_json(spec), "kept": [key for key, _ in spec.kept]}


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Every tensor under its own name."""
    return [rename(name, name) for name in parameter_shapes(spec)]


FAMILY = Family("cutaway", "", read, write, rules, base_prefix="")
