"""How a model knows where a token stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """One learned row for each position, added to the token's embedding.

    Attributes:
        n_rows: rows in the table.
        offset: row of position 0 (RoBERTa and BART start at 2).
    """

    n_rows: int
    offset: int = 0

    @property
    def limit(self) -> int:
        """Positions that have a row."""
        return self.n_rows - self.offset


@dataclass(frozen=True, slots=True)
class SinusoidalPositions:
    """Fixed waves, slower and slower along the width, added to the token's embedding (Vaswani et al. 2017).

    Attributes:
        layout: ``"interleaved"`` alternates sine and cosine (the paper), ``"halves"`` has all sines first.
    """

    layout: Literal["interleaved", "halves"] = "interleaved"


@dataclass(frozen=True, slots=True)
class AlibiBias:
    """Scores lowered in proportion to the distance, by a slope for each head (Press et al. 2022).

    Attributes:
        order: where the head count is no power of two: ``"append"`` puts the in-between slopes after those of the
            power below (BLOOM, Falcon), ``"interleave"`` picks from those of the power above (MPT).
        max_bias: the slopes run down to ``2 ** -max_bias``.
        scaled: whether the bias is added before the scores are scaled (Falcon) rather than after.
        half: whether slope times distance is rounded to bfloat16 (Falcon).
    """

    order: Literal["append", "interleave"] = "append"
    max_bias: float = 8.0
    scaled: bool = False
    half: bool = False


@dataclass(frozen=True, slots=True)
class BucketBias:
    """A learned number for each head and bucket of distances, shared by the layers of a stack (Raffel et al. 2020).

    Attributes:
        n_buckets: half of them for exact short distances, half for growing ranges.
        max_distance: everything from here on is one bucket.
        both_ways: whether keys after the query have buckets of their own.
    """

    n_buckets: int
    max_distance: int
    both_ways: bool = False


@dataclass(frozen=True, slots=True)
class ShawRelative:
    """A learned vector for each distance, added to the keys and perhaps the values (Shaw et al. 2018).

    Attributes:
        max_distance: distances are clipped to this, both ways.
        values: whether the values get vectors too.
    """

    max_distance: int
    values: bool = True


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every speed divided by ``factor`` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow pairs slowed by ``factor``, fast ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """NTK-by-parts interpolation with a magnitude factor on the table (Peng et al. 2023).

    Attributes:
        factor: how much longer than ``original_max_positions`` the text may be.
        attention_factor: multiplies cos and sin; None takes it from the formula.
        beta_fast, beta_slow: turns within the original length at which the ramp ends and starts.
        mscale, mscale_all_dim: DeepSeek's two weights of the magnitude; None leaves them out.
        truncate: whether the ramp's ends are rounded to whole pairs.
    """

    factor: float
    original_max_positions: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base grows with the text once that is longer than trained (dynamic NTK, bloc97 and emozilla 2023).

    How long the text is, is asked of each text anew in every pass. Keys that a cache holds keep the angles they got:
    a text generated past the original length differs from the same text read at once, as in the reference.
    """

    factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Each pair's speed divided by its own factor, one list for short and one for long texts (Ding et al. 2024).

    Attributes:
        short, long: a factor for each pair.
        original_max_positions: a text longer than this takes the long list, asked of each text anew in every pass,
            whatever a cache has room for. Where generation goes past it, keys that the cache holds keep their angles
            and new ones take the long list: read such a text again at once if it is to be as if it had been long.
        factor: how much longer than that a text may be.
        attention_factor: multiplies cos and sin; None takes it from the formula.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int
    factor: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """Each pair's speed divided by its own stated factor (a GGUF's ``rope_freqs`` tensor)."""

    factors: tuple[float, ...]


RotaryScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling | DynamicScaling | LongScaling


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary positions: pairs of a query's and a key's channels turn with the position (Su et al. 2021).

    Attributes:
        base: pair i turns by ``base ** (-2 i / d_rotary)`` radians a position.
        d_rotary: channels that turn, the first of each head; the rest pass through.
        scaling: how the speeds are altered for texts longer than trained.
        interleaved: a pair is two neighbouring channels (GPT-J), not two that stand half the width apart.
        cast: in half precision, whether cos and sin are cast down ``"before"`` the turn or what was turned ``"after"``
            it (OLMo 2). No difference in fp32.
    """

    base: float
    d_rotary: int
    scaling: RotaryScaling | None = None
    interleaved: bool = False
    cast: Literal["before", "after"] = "before"
