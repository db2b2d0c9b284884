"""Token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from cutaway.modules.norm import Norm
from cutaway.modules.tap import Tap
from cutaway.shapes import Ids, Positions, Stream
from cutaway.spec import EmbeddingSpec, LearnedPositions, SinusoidalPositions


class Embedding(nn.Module):
    """A table's rows, perhaps scaled, perhaps with a row for the position added.

    Args:
        spec: what is added and how it is scaled.
        vocab_size, d_model: the table's rows and width.
    """

    def __init__(self, spec: EmbeddingSpec, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.tokens = nn.Parameter(torch.empty(vocab_size, d_model))
        table = spec.positions
        n_rows = table.n_rows if isinstance(table, LearnedPositions) else None
        self.positions = None if n_rows is None else nn.Parameter(torch.empty(n_rows, d_model))
        self.norm = None if spec.norm is None else Norm(spec.norm, d_model)

    def forward(self, ids: Ids, positions: Positions, tap: Tap | None = None) -> Stream:
        """Taps ``tokens`` (scaled), ``positions`` where there is a table, and ``out``, their sum."""
        spec = self.spec
        x = F.embedding(ids, self.tokens)
        if spec.scale != 1.0:
            scale = torch.tensor(spec.scale, dtype=x.dtype if spec.round_scale else torch.float32, device=x.device)
            x = (x * scale).to(x.dtype)
        if tap is not None:
            x = tap("tokens", x)
        if spec.positions is not None:
            rows = self._rows(positions, x)
            if tap is not None:
                rows = tap("positions", rows)
            x = x + rows
        if self.norm is not None:
            x = self.norm(x, tap)
        if spec.dropout:
            x = F.dropout(x, spec.dropout, self.training)
        return x if tap is None else tap("out", x)

    def _rows(self, positions: Positions, x: Stream) -> Stream:
        # Pads stand at −1, which has no row; theirs is never read.
        places = positions.clamp(min=0)
        table = self.spec.positions
        if isinstance(table, LearnedPositions):
            assert self.positions is not None
            return F.embedding(places + table.offset, self.positions)
        assert table is not None
        return sinusoids(table, places, x.shape[-1]).to(x.dtype)


def sinusoids(spec: SinusoidalPositions, positions: Positions, width: int) -> Stream:
    """sin and cos of ``position / 10000 ** (2 i / width)`` (Vaswani et al. 2017). [batch, query, width]"""
    speeds = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width)
    angles = positions[..., None].float() * speeds
    if spec.layout == "interleaved":
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
