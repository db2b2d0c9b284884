"""A learned matrix, and perhaps a shift."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """``y = x Wᵀ + b``.

    Args:
        n_in, n_out: widths; the weight is [n_out, n_in].
        bias: whether there is a b.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., n_in] → [..., n_out]"""
        return F.linear(x, self.weight, self.bias)
