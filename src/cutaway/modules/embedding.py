"""Token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.modules.norm import Norm
from cutaway.modules.part import Part
from cutaway.modules.tap import Tap
from cutaway.shapes import Ids, Positions, Stream
from cutaway.spec import EmbeddingSpec, LearnedPositions, SinusoidalPositions


class Embedding(Part):
    """A table's rows, perhaps scaled, perhaps with a row for the position added.

    Args:
        spec: what is added and how it is scaled.
        vocab_size, d_model: the table's rows and width; no rows where another's table is used.
    """

    def __init__(self, spec: EmbeddingSpec, vocab_size: int | None, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.tokens = None if vocab_size is None else nn.Parameter(torch.empty(vocab_size, d_model))
        table = spec.positions
        n_rows = table.n_rows if isinstance(table, LearnedPositions) else None
        self.positions = None if n_rows is None else nn.Parameter(torch.empty(n_rows, d_model))
        self.types = nn.Parameter(torch.empty(spec.types, d_model)) if spec.types else None
        self.norm = None if spec.norm is None else Norm(spec.norm, d_model)

    @property
    def table(self) -> Tensor:
        """Its own rows of tokens. [vocab, d_model]"""
        assert self.tokens is not None, "it uses another's table"
        return self.tokens

    def forward(
        self,
        ids: Ids,
        positions: Positions,
        tap: Tap | None = None,
        types: Ids | None = None,
        tokens: Tensor | None = None,
    ) -> Stream:
        """Taps ``tokens`` (scaled), ``positions`` and ``types`` where there are tables, and ``out``, their sum.

        Args:
            ids, positions: [batch, query]
            tap: reads or edits.
            types: each token's type; 0 where nothing is said. [batch, query]
            tokens: the table to use where there is none of its own. [vocab, d_model]
        """
        spec = self.spec
        x = F.embedding(ids, self.table if tokens is None else tokens)
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
        if self.types is not None:
            rows = F.embedding(torch.zeros_like(ids) if types is None else types, self.types)
            if tap is not None:
                rows = tap("types", rows)
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
    # In double precision where there is any: an angle of a thousand radians has lost three digits in fp32.
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    speeds = 10000.0 ** (-torch.arange(0, width, 2, dtype=wide, device=positions.device) / width)
    angles = positions[..., None].to(wide) * speeds
    sine, cosine = angles.sin().float(), angles.cos().float()
    if spec.layout == "interleaved":
        return torch.stack([sine, cosine], dim=-1).flatten(-2)[..., :width]
    return torch.cat([sine, cosine], dim=-1)
