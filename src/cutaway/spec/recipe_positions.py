"""How a recipe says where a token stands: a word, or an object with the fields of the spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cutaway.errors import ConfigError
from cutaway.spec.position import (
    AlibiBias,
    BucketBias,
    LearnedPositions,
    RotarySpec,
    ShawRelative,
    SinusoidalPositions,
)
from cutaway.spec.serial import read

__all__ = ["Positions", "read_positions"]


@dataclass(frozen=True, slots=True)
class Positions:
    """What one word comes to, in the parts of the spec that it touches.

    Attributes:
        rotary, bias, relative: as attention has them.
        learned, sinusoidal: what is added to the embedding; a learned table may leave its rows open.
    """

    rotary: RotarySpec | None = None
    bias: AlibiBias | BucketBias | None = None
    relative: ShawRelative | None = None
    learned: Mapping[str, Any] | None = None
    sinusoidal: SinusoidalPositions | None = None

    @property
    def at_embedding(self) -> bool:
        """Whether it is added to the embedding, once for all layers."""
        return self.learned is not None or self.sinusoidal is not None

    def table(self, max_positions: int) -> LearnedPositions | SinusoidalPositions | None:
        """What is added to the embedding: by default a row for each position of the model."""
        if self.learned is None:
            return self.sinusoidal
        offset = self.learned.get("offset", 0)
        return read(
            LearnedPositions,
            self.learned,
            "/positions",
            n_rows=max_positions + (offset if isinstance(offset, int) else 0),
        )


def _rotary(fields: dict[str, Any], d_head: int, at: str) -> Positions:
    share = fields.pop("share", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError("out of range", field=f"{at}/share", expected="a share of the head, > 0 and ≤ 1", got=share)
    return Positions(rotary=read(RotarySpec, fields, at, base=10_000.0, d_rotary=int(d_head * share) // 2 * 2))


def _buckets(fields: dict[str, Any], at: str, both_ways: bool) -> Positions:
    # T5's own numbers (Raffel et al. 2020).
    return Positions(bias=read(BucketBias, fields, at, n_buckets=32, max_distance=128, both_ways=both_ways))


# Word → its fields, the width of a head, where they stand, and whether a token also reads those after it.
_WORDS: dict[str, Callable[[dict[str, Any], int, str, bool], Positions]] = {
    "none": lambda fields, d_head, at, both: Positions(),
    "learned": lambda fields, d_head, at, both: Positions(learned=fields),
    "sinusoidal": lambda fields, d_head, at, both: Positions(sinusoidal=read(SinusoidalPositions, fields, at)),
    "rotary": lambda fields, d_head, at, both: _rotary(fields, d_head, at),
    "alibi": lambda fields, d_head, at, both: Positions(bias=read(AlibiBias, fields, at)),
    "t5": lambda fields, d_head, at, both: _buckets(fields, at, both),
    # The number of Shaw et al. 2018.
    "shaw": lambda fields, d_head, at, both: Positions(relative=read(ShawRelative, fields, at, max_distance=16)),
}


def read_positions(value: object, d_head: int, at: str, both_ways: bool = False) -> Positions:
    """A word, or an object whose ``type`` is the word.

    Args:
        value: that.
        d_head: width of a head.
        at: where it stands.
        both_ways: whether a token also reads those after it.

    Raises:
        ConfigError: neither, or with a field that is unknown or out of range.
    """
    fields = {"type": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping):
        raise ConfigError("of a wrong type", field=at, expected=f"{' or '.join(_WORDS)}, or an object", got=value)
    word = fields.get("type")
    if not isinstance(word, str) or word not in _WORDS:
        raise ConfigError("unknown value", field=at, expected=" or ".join(_WORDS), got=word)
    return _WORDS[word]({key: item for key, item in fields.items() if key != "type"}, d_head, at, both_ways)
