"""Texts of different lengths as one rectangle, and where each token of it stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad(rows: Sequence[Sequence[int]], *, fill: int = 0, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Ids and positions, both [batch, longest], for a model to read. A pad's position is −1: there is nothing there.

    Args:
        rows: ids of each text.
        fill: what stands at a pad; no model looks at it, but a loss may (−100).
        multiple: the width is the longest row's length, or the next multiple of this.

    >>> ids, positions = pad([[5, 6, 7], [8]])
    >>> ids.tolist(), positions.tolist()
    ([[5, 6, 7], [8, 0, 0]], [[0, 1, 2], [0, -1, -1]])
    """
    width = max(map(len, rows), default=0)
    width += -width % multiple
    ids = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.long)
    lengths = torch.tensor([[len(row)] for row in rows], dtype=torch.long)
    steps = torch.arange(width)
    return ids.view(len(rows), width), torch.where(steps < lengths, steps, -1)
