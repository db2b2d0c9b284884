"""Rows in groups, each group times a matrix of its own: a mixture's tokens in the order of their experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.kernels.followed import followed
from cutaway.kernels.layout import Matrix
from cutaway.kernels.library import library
from cutaway.kernels.stored import Stored

Grouped: TypeAlias = Callable[[Tensor, Tensor, list[int]], Tensor]


def grouped(x: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    """The definition. [row, cols] and [group, rows, cols] → [row, rows]

    Args:
        x: the rows, those of a group side by side.
        matrices: one for each group.
        counts: rows of each group.
    """
    # All at once: one by one, the gradient of each matrix would be a tensor of the size of all of them.
    parts = zip(x.split(counts), matrices.unbind(), strict=True)
    return torch.cat([x.new_empty(0, matrices.shape[1]), *(F.linear(part, w) for part, w in parts if len(part))])


def grouped_natively(x: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    """The same by the native library, where there is one and nobody wants gradients: a row has the bits that
    :func:`cutaway.kernels.multiply` gives it. [row, cols] and [group, rows, cols] → [row, rows]
    """
    native = library()
    stored = isinstance(matrices, Stored)
    plain = all(t.dtype is torch.float32 and t.device.type == "cpu" for t in (x, matrices))
    if native is None or followed(x, matrices) or not plain or not (stored or matrices.is_contiguous()):
        return grouped(x, matrices, counts)
    lies, number = (matrices.raw, matrices.format) if isinstance(matrices, Stored) else (matrices, 0)
    groups, rows, cols = matrices.shape
    first = Matrix(data=lies.data_ptr(), rows=rows, cols=cols, format=number)
    return native.grouped(x, first, lies.nbytes // max(groups, 1), counts)
