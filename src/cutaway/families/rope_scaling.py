"""Scalings of rotary positions, as configs spell them."""

from __future__ import annotations

from typing import Any

from cutaway.errors import ConfigError
from cutaway.formats.config import ConfigReader
from cutaway.spec import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    YarnScaling,
)
from cutaway.spec.position import RotaryScaling

_TYPES = {name: name for name in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")} | {"su": "longrope"}
_LONGEST = 1 << 40


def read_scaling(
    c: ConfigReader, d_rotary: int, max_positions: int, original: int | None = None
) -> RotaryScaling | None:
    """The scaling that one ``rope_parameters`` or ``rope_scaling`` object states.

    Args:
        c: the object.
        d_rotary: channels that turn.
        max_positions: what the config says the model can read.
        original: ``original_max_position_embeddings`` where the config states it beside the object.
    """
    new, old = c.raw("rope_type", None), c.raw("type", None)
    if new is not None and old is not None and new != old:
        raise c.error("type", "differs from rope_type", expected=new, got=old)
    kind = c.choice("rope_type" if new is not None else "type", _TYPES, "default")

    def trained() -> int:
        key = "original_max_position_embeddings"
        stated = c.integer(key, original or max_positions, low=2, high=_LONGEST)
        if original is not None and stated != original:
            raise c.error(key, f"differs from {key} outside", expected=original, got=stated)
        return int(stated)

    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(c.number("factor", above=0))
        case "dynamic":
            return DynamicScaling(c.number("factor", above=0), max_positions)
        case "llama3":
            low = c.number("low_freq_factor", above=0)
            high = c.number("high_freq_factor", above=low)
            return Llama3Scaling(c.number("factor", above=0), low, high, trained())
        case "longrope":
            n = trained()
            factor = c.number("factor", max_positions / n, above=0)
            stated = c.number("attention_factor", None, above=0)
            return LongScaling(
                _factors(c, "short_factor", d_rotary), _factors(c, "long_factor", d_rotary), n, factor, stated
            )
        case _:
            return YarnScaling(
                factor=c.number("factor", above=0),
                original_max_positions=trained(),
                attention_factor=c.number("attention_factor", None, above=0),
                beta_fast=c.number("beta_fast", 32.0, above=0),
                beta_slow=c.number("beta_slow", 1.0, above=0),
                mscale=c.number("mscale", None, low=0),
                mscale_all_dim=c.number("mscale_all_dim", None, low=0),
                truncate=c.flag("truncate", True),
            )


def _factors(c: ConfigReader, key: str, d_rotary: int) -> tuple[float, ...]:
    """One positive number for each pair."""
    values = c.raw(key)
    numbers = isinstance(values, list) and all(type(v) in (int, float) and 0 < v < float("inf") for v in values)
    if not numbers or len(values) != d_rotary // 2:
        raise c.error(key, "one positive factor for each rotary pair is needed", expected=d_rotary // 2, got=values)
    return tuple(float(value) for value in values)


def write_scaling(scaling: RotaryScaling | None) -> dict[str, Any]:
    """The inverse of :func:`read_scaling`."""
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case DynamicScaling(factor):
            return {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case LongScaling() as long:
            return _stated(
                rope_type="longrope",
                short_factor=list(long.short),
                long_factor=list(long.long),
                original_max_position_embeddings=long.original_max_positions,
                factor=long.factor,
                attention_factor=long.attention_factor,
            )
        case YarnScaling() as yarn:
            return _stated(
                rope_type="yarn",
                factor=yarn.factor,
                original_max_position_embeddings=yarn.original_max_positions,
                attention_factor=yarn.attention_factor,
                beta_fast=yarn.beta_fast,
                beta_slow=yarn.beta_slow,
                mscale=yarn.mscale,
                mscale_all_dim=yarn.mscale_all_dim,
                truncate=yarn.truncate,
            )
        case FactorScaling():
            raise ConfigError(
                "a list of rotary factors (from a GGUF's rope_freqs) has no spelling in a Hugging Face config",
                field="/rope_parameters",
                hint="Load the model from its original Hugging Face folder instead.",
            )


def _stated(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
