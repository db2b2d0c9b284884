"""Attention: the one place where positions exchange information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cutaway.spec.norm import NormSpec
from cutaway.spec.position import AlibiBias, BucketBias, RotarySpec, ShawRelative


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which keys a query may read, as a rule over positions.

    Attributes:
        causal: only keys at the query's position or before.
        window: only keys less than this many positions away (both ways unless causal); None for all.
        chunk: only keys in the same run of this many positions; None for all.
        prefix: tokens of a prefix also read one another both ways. Which they are, the segments say: a token
            of document d has segment d, and ``-1 - d`` within the prefix.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Multi-head attention with shared key/value heads (Vaswani et al. 2017; Ainslie et al. 2023).

    Attributes:
        n_heads: query heads.
        n_kv_heads: key/value heads; query head h reads key/value head ``h // (n_heads // n_kv_heads)``.
        d_head: width of one head, free of ``d_model / n_heads``.
        mask: the rule of who may read whom.
        rotary: rotary positions of this layer, if any.
        qk_norm: norm of queries and keys.
        qk_norm_over: each ``"head"`` on its own, or the whole ``"width"`` of the projection (OLMo 2).
        qk_norm_after: norm after rotation rather than before.
        bias: a bias on the scores by distance.
        relative: learned vectors for distances.
        clip: projections are clamped to ±clip (MPT).
        scale: multiplies the scores; None means ``d_head ** -0.5``.
        soft_cap: scores become ``cap * tanh(scores / cap)``.
        qkv_bias, out_bias: whether the projections have biases.
        dropout: share of the weights dropped in training.
        cross: keys and values are of the encoder's output rather than of the stream.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    mask: MaskRule = MaskRule()
    rotary: RotarySpec | None = None
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "width"] = "head"
    qk_norm_after: bool = False
    bias: AlibiBias | BucketBias | None = None
    relative: ShawRelative | None = None
    clip: float | None = None
    scale: float | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: float = 0.0
    cross: bool = False

    @property
    def score_scale(self) -> float:
        """The factor on ``q · k``."""
        return self.d_head**-0.5 if self.scale is None else self.scale
