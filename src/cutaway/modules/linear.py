"""A learned matrix, and perhaps a shift."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.modules.part import Part

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(Part):
    """``y = x Wᵀ + b``.

    Args:
        n_in, n_out: widths; the weight is [n_out, n_in].
        bias: whether there is a b.
    """

    def __init__(self, n_in: int, n_out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None
        self.product: Product = F.linear  # or another implementation of it: see Transformer.use_kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., n_in] → [..., n_out]"""
        return self.product(x, self.weight, self.bias)
