"""How a model knows where a token stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


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
class FactorScaling:
    """Each pair's speed divided by its own stated factor (a GGUF's ``rope_freqs`` tensor)."""

    factors: tuple[float, ...]


RotaryScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary positions: pairs of a query's and a key's channels turn with the position (Su et al. 2021).

    Attributes:
        base: pair i turns by ``base ** (-2 i / d_rotary)`` radians a position.
        d_rotary: channels that turn, the first of each head; the rest pass through.
        scaling: how the speeds are altered for texts longer than trained.
    """

    base: float
    d_rotary: int
    scaling: RotaryScaling | None = None
