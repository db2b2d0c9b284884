"""The feed-forward network: each position on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Activation: TypeAlias = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu", "tanh"]


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))`` (Shazeer 2020).

    Attributes:
        d_ff: width between the two projections.
        activation: ``gelu`` is exact (erf), ``gelu_tanh`` its approximation, ``relu2`` the square of ReLU.
        gated: whether a second projection opens and closes each channel.
        bias: whether gate and up have biases.
        out_bias: whether down has one.
        dropout: share of what down reads that is dropped in training.
    """

    d_ff: int
    activation: Activation
    gated: bool = False
    bias: bool = False
    out_bias: bool = False
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A router sends each token to a few of many feed-forward networks (Shazeer et al. 2017; Jiang et al. 2024).

    Attributes:
        n_experts: networks there are.
        top_k: networks a token goes to.
        expert: what one of them is.
        normalised: whether the chosen shares are divided by their sum.
        jitter: in training, what is read is multiplied by random numbers in 1 ± jitter (Fedus et al. 2021).
    """

    n_experts: int
    top_k: int
    expert: MlpSpec
    normalised: bool = True
    jitter: float = 0.0
