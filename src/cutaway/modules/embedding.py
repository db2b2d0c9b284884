"""Token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from cutaway.modules.tap import Tap
from cutaway.shapes import Ids, Positions, Stream
from cutaway.spec import EmbeddingSpec


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
        self.positions = None if table is None else nn.Parameter(torch.empty(table.n_rows, d_model))

    def forward(self, ids: Ids, positions: Positions, tap: Tap | None = None) -> Stream:
        """Taps ``tokens`` (scaled), ``positions`` where there is a table, and ``out``, their sum."""
        spec = self.spec
        x = F.embedding(ids, self.tokens)
        if spec.scale != 1.0:
            scale = torch.tensor(spec.scale, dtype=x.dtype if spec.round_scale else torch.float32, device=x.device)
            x = (x * scale).to(x.dtype)
        if tap is not None:
            x = tap("tokens", x)
        if self.positions is not None and spec.positions is not None:
            # Pads stand at −1, which has no row; theirs is never read.
            rows = F.embedding(positions.clamp(min=0) + spec.positions.offset, self.positions)
            if tap is not None:
                rows = tap("positions", rows)
            x = x + rows
        if spec.dropout:
            x = F.dropout(x, spec.dropout, self.training)
        return x if tap is None else tap("out", x)
