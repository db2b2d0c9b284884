"""Rotary positions in configs, in both of today's spellings.

The newer one nests everything in ``rope_parameters``; the older one has ``rope_theta`` beside
``rope_scaling``.
"""

from __future__ import annotations

from typing import Any

from cutaway.errors import ConfigError
from cutaway.formats.config import ConfigReader
from cutaway.spec import FactorScaling, LinearScaling, Llama3Scaling, RotarySpec, YarnScaling
from cutaway.spec.position import RotaryScaling

_TYPES = {name: name for name in ("default", "linear", "llama3", "yarn")}


def read_rotary(c: ConfigReader, d_rotary: int, max_positions: int, *, base: float = 10000.0) -> RotarySpec:
    """The rotary positions that a config states.

    Args:
        c: the config.
        d_rotary: channels that turn.
        max_positions: what a scaling's original length is when it states none.
        base: the family's default.
    """
    if d_rotary % 2:
        raise c.error("head_dim", "rotary positions need an even width", expected="an even number", got=d_rotary)
    nested, scaled = c.section("rope_parameters"), c.section("rope_scaling")
    outer = c.number("rope_theta", None, above=0)
    if nested is None:
        scaling = None if scaled is None else _scaling(scaled, d_rotary, max_positions)
        return RotarySpec(base if outer is None else outer, d_rotary, scaling)
    spec = read_rotary_section(nested, d_rotary, max_positions, base=base if outer is None else outer)
    if outer is not None and outer != spec.base:
        raise c.error("rope_theta", "differs from rope_parameters/rope_theta", expected=spec.base, got=outer)
    if scaled is not None and _scaling(scaled, d_rotary, max_positions) != spec.scaling:
        raise c.error("rope_scaling", "differs from rope_parameters")
    return spec


def read_rotary_section(c: ConfigReader, d_rotary: int, max_positions: int, *, base: float) -> RotarySpec:
    """One ``rope_parameters`` object."""
    theta = c.number("rope_theta", base, above=0)
    return RotarySpec(theta, d_rotary, _scaling(c, d_rotary, max_positions))


def _scaling(c: ConfigReader, d_rotary: int, max_positions: int) -> RotaryScaling | None:
    new, old = c.raw("rope_type", None), c.raw("type", None)
    if new is not None and old is not None and new != old:
        raise c.error("type", "differs from rope_type", expected=new, got=old)
    kind = c.choice("rope_type" if new is not None else "type", _TYPES, "default")
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(c.number("factor", above=0))
        case "llama3":
            low = c.number("low_freq_factor", above=0)
            high = c.number("high_freq_factor", above=low)
            original = c.integer("original_max_position_embeddings", max_positions, high=1 << 40)
            return Llama3Scaling(c.number("factor", above=0), low, high, original)
        case _:
            return YarnScaling(
                factor=c.number("factor", above=0),
                original_max_positions=c.integer("original_max_position_embeddings", max_positions, high=1 << 40),
                attention_factor=c.number("attention_factor", None, above=0),
                beta_fast=c.number("beta_fast", 32.0, above=0),
                beta_slow=c.number("beta_slow", 1.0, above=0),
                mscale=c.number("mscale", None, low=0),
                mscale_all_dim=c.number("mscale_all_dim", None, low=0),
                truncate=c.flag("truncate", True),
            )


def write_rotary(spec: RotarySpec) -> dict[str, Any]:
    """The ``rope_parameters`` object of a spec."""
    out: dict[str, Any] = {"rope_theta": spec.base}
    match spec.scaling:
        case None:
            return {"rope_type": "default", **out}
        case LinearScaling(factor):
            return {"rope_type": "linear", **out, "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                **out,
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case YarnScaling() as yarn:
            stated = {
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_max_positions,
                "attention_factor": yarn.attention_factor,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "mscale": yarn.mscale,
                "mscale_all_dim": yarn.mscale_all_dim,
                "truncate": yarn.truncate,
            }
            return {"rope_type": "yarn", **out, **{key: value for key, value in stated.items() if value is not None}}
        case FactorScaling():
            raise ConfigError(
                "a list of rotary factors (from a GGUF's rope_freqs) has no spelling in a Hugging Face config",
                field="/rope_parameters",
                hint="Load the model from its original Hugging Face folder instead.",
            )
