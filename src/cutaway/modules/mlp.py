"""The feed-forward network: each position on its own."""

from __future__ import annotations

import torch.nn.functional as F

from cutaway.modules.activation import ACTIVATIONS
from cutaway.modules.linear import Linear
from cutaway.modules.part import Part
from cutaway.modules.tap import Tap
from cutaway.shapes import Stream
from cutaway.spec import MlpSpec


class Mlp(Part):
    """``down(act(up(x)))``, or gated ``down(act(gate(x)) * up(x))`` (Shazeer 2020).

    Args:
        spec: widths, curve and biases.
        d_model: width of the residual stream.
    """

    def __init__(self, spec: MlpSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Linear(d_model, spec.d_ff, spec.bias) if spec.gated else None
        self.up = Linear(d_model, spec.d_ff, spec.bias)
        self.down = Linear(spec.d_ff, d_model, spec.out_bias)

    def forward(self, x: Stream, tap: Tap | None = None) -> Stream:
        """Taps ``gate`` and ``up`` before the curve, ``act`` as ``down`` reads it. [batch, query, d_ff]"""
        act = ACTIVATIONS[self.spec.activation]
        hidden = self.up(x)
        if tap is not None:
            hidden = tap("up", hidden)
        if self.gate is None:
            hidden = act(hidden)
        else:
            gate = self.gate(x)
            if tap is not None:
                gate = tap("gate", gate)
            hidden = act(gate) * hidden
        if tap is not None:
            hidden = tap("act", hidden)
        if self.spec.dropout:
            hidden = F.dropout(hidden, self.spec.dropout, self.training)
        return self.down(hidden)
