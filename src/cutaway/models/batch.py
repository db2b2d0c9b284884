"""Texts of different lengths as one rectangle, and where each token of it stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cutaway.errors import ContextExceeded, RequestError


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


def check_positions(ids: Tensor, positions: Tensor) -> None:
    """Refuse what is no batch, or no positions of one.

    Raises:
        RequestError: such as a mask in their place.
    """
    hint = "Positions are 0, 1, 2 … and −1 for a pad; cutaway.pad makes them of rows of ids."
    if ids.dim() != 2:
        raise RequestError("not a batch of texts", field="ids", expected="[batch, query]", got=list(ids.shape))
    if positions.dtype == torch.bool or positions.is_floating_point():
        what = "a mask is no positions" if positions.dtype == torch.bool else "positions are whole numbers"
        raise RequestError(what, field="positions", expected="int64", got=str(positions.dtype), hint=hint)
    if positions.shape != ids.shape:
        wanted = list(ids.shape)
        raise RequestError("not one for each token", field="positions", expected=wanted, got=list(positions.shape))


def check_limit(positions: Tensor, limit: int | None) -> None:
    """Refuse what a learned table has no row for.

    Raises:
        ContextExceeded: a position at or past ``limit``.
    """
    if limit is not None and positions.numel() and int(positions.max()) >= limit:
        last = int(positions.max())
        raise ContextExceeded("past the end of the position table", expected=f"positions below {limit}", got=last)
