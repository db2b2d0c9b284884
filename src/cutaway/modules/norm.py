"""Bringing a vector to a steady range."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.modules.part import Identity, Part
from cutaway.modules.tap import Tap
from cutaway.spec import NormSpec


class Norm(Part):
    """LayerNorm or RMSNorm over the last axis (Ba et al. 2016; Zhang & Sennrich 2019).

    Args:
        spec: which, and how.
        width: of the vectors.
    """

    def __init__(self, spec: NormSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if spec.bias else None

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        """[..., width] → [..., width]. Taps ``norm_scale``, one over the vector's spread: [..., 1]."""
        spec = self.spec
        if spec.kind == "layer" and (tap is None or not tap.wants("norm_scale")):
            weight = self.weight + spec.offset if spec.offset else self.weight
            return F.layer_norm(x, weight.shape, weight, self.bias, spec.eps)
        full = x.float()
        if spec.kind == "layer":
            full = full - full.mean(-1, keepdim=True)
        scale = torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + spec.eps)
        if tap is not None:
            scale = tap("norm_scale", scale)
        y = full * scale
        if spec.kind == "rms" and spec.cast == "before":
            y = y.to(x.dtype) * (self.weight + spec.offset if spec.offset else self.weight)
            return y if self.bias is None else y + self.bias
        y = y * (self.weight.float() + spec.offset)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


def norm_or_identity(spec: NormSpec | None, width: int) -> nn.Module:
    """A slot for a norm: what a spec leaves out passes everything through."""
    return Identity() if spec is None else Norm(spec, width)
