"""Attention: the one place where positions exchange information."""

from __future__ import annotations

from dataclasses import dataclass

from cutaway.spec.norm import NormSpec
from cutaway.spec.position import RotarySpec


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which keys a query may read, as a rule over positions.

    Attributes:
        causal: only keys at the query's position or before.
        window: only keys less than this many positions away (both ways unless causal); None for all.
    """

    causal: bool = True
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Multi-head attention with shared key/value heads (Vaswani et al. 2017; Ainslie et al. 2023).

    Attributes:
        n_heads: query heads.
        n_kv_heads: key/value heads; query head h reads key/value head ``h // (n_heads // n_kv_heads)``.
        d_head: width of one head, free of ``d_model / n_heads``.
        mask: the rule of who may read whom.
        rotary: rotary positions of this layer, if any.
        qk_norm: norm of each head's query and key, before rotation.
        scale: multiplies the scores; None means ``d_head ** -0.5``.
        soft_cap: scores become ``cap * tanh(scores / cap)``.
        qkv_bias, out_bias: whether the projections have biases.
        dropout: share of the weights dropped in training.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    mask: MaskRule = MaskRule()
    rotary: RotarySpec | None = None
    qk_norm: NormSpec | None = None
    scale: float | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: float = 0.0

    @property
    def score_scale(self) -> float:
        """The factor on ``q · k``."""
        return self.d_head**-0.5 if self.scale is None else self.scale
