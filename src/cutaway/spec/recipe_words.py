"""The words of a recipe: their names, and what each may be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from sys import float_info
from typing import Any, Final, final

from cutaway.errors import ConfigError

__all__ = ["LAYER", "MODEL", "Words"]

# Word → type. Those of the second group may differ by layer, in an entry of the pattern.
MODEL: dict[str, str] = {
    "d_model": "size",
    "layers": "count",
    "encoder_layers": "count",
    "kind": "decoder encoder",
    "vocab_size": "size",
    "source_vocab_size": "size",
    "max_positions": "size",
    "pattern": "pattern",
    "tied": "flag",
    "embed_scale": "number",
    "embed_norm": "flag",
    "logit_scale": "number",
    "logit_cap": "number",
    "types": "size",
    "labels": "any",
    "pool": "first cls last mean none",
    "head_bias": "flag",
    "head_transform": "flag",
    "dropout": "number",
}
LAYER: dict[str, str] = {
    "n_heads": "size",
    "n_kv_heads": "size",
    "d_head": "size",
    "d_ff": "size",
    "window": "size",
    "chunk": "size",
    "causal": "flag",
    "prefix": "flag",
    "norm": "any",
    "where": "pre post out sandwich none",
    "parallel": "flag",
    "shared_norm": "flag",
    "positions": "any",
    "activation": "relu relu2 gelu gelu_tanh silu",
    "gated": "flag",
    "bias": "flag",
    "qkv_bias": "flag",
    "qk_norm": "head width none",
    "score_scale": "number",
    "score_cap": "number",
    "clip": "number",
    "branch_scale": "number",
    "experts": "any",
}


@final
class Words:
    """The words of a recipe, each of a known name and type."""

    def __init__(self, values: object, known: Mapping[str, str], at: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError("not an object", field=at or "/", expected="words with their values", got=values)
        self.at: Final = at
        self._values: Final = values
        for key, value in values.items():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
                raise ConfigError("unknown word", field=f"{at}/{key}", got=value, hint=hint)
            if value is not None:
                self._check(key, value, known[key])

    def _check(self, key: str, value: object, kind: str) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        match kind:
            case "any":
                return
            case "size":
                fine, wanted = type(value) is int and value > 0, "a whole number > 0"
            case "count":
                fine, wanted = type(value) is int and value >= 0, "a whole number"
            case "flag":
                fine, wanted = isinstance(value, bool), "true or false"
            case "number":
                fine, wanted = number and abs(value) <= float_info.max, "a finite number"  # type: ignore[arg-type]
            case "pattern":
                fine, wanted = isinstance(value, Sequence) and not isinstance(value, str), "a list"
                fine = fine and len(value) > 0  # type: ignore[arg-type]
            case words:
                fine, wanted = value in words.split(), " or ".join(words.split())
        if not fine:
            raise ConfigError("of a wrong type", field=f"{self.at}/{key}", expected=wanted, got=value)

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        if value is None:
            return default
        return float(value) if type(value) is int and (MODEL | LAYER).get(key) == "number" else value
