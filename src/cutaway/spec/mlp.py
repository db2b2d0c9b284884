"""The feed-forward network: each position on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))`` (Shazeer 2020).

    Attributes:
        d_ff: width between the two projections.
        activation: ``gelu`` is exact (erf), ``gelu_tanh`` its approximation.
        gated: whether a second projection opens and closes each channel.
        bias: whether gate and up have biases.
        out_bias: whether down has one.
    """

    d_ff: int
    activation: Activation
    gated: bool = False
    bias: bool = False
    out_bias: bool = False
