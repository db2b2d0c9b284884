"""The transformer: an embedding, a stack of blocks, a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cutaway.cache import Cache, NoCache, StoredCache, new_cache
from cutaway.errors import ContextExceeded
from cutaway.models.compiled import compiled_blocks
from cutaway.models.head import Head
from cutaway.modules.attention import How
from cutaway.modules.block import Block
from cutaway.modules.embedding import Embedding
from cutaway.modules.rotary import asks_length, text_lengths
from cutaway.modules.stack import Stack
from cutaway.modules.tap import Tap
from cutaway.shapes import Ids, Logits, Stream
from cutaway.spec import ModelSpec


class Transformer(nn.Module):
    """A decoder-only language model, assembled from its spec.

    ::

        ids ──► embed ──► layers.0 ──► … ──► layers.n ──► norm ──► head ──► logits

    Args:
        spec: what it is made of. Weights start empty; see ``checkpoints`` for loading.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.attention: How = "fused"  # or the readable one everywhere, or block by block, for comparison
        self.warned_length = False  # whether the one warning about long texts was given
        self.embed = Embedding(spec.embedding, spec.vocab_size, spec.d_model)
        self.decoder = Stack(spec.decoder, spec.d_model)
        self.head = Head(spec.head, spec.vocab_size, spec.d_model)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.embed.tokens.dtype

    def forward(
        self,
        ids: Ids,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
    ) -> Logits:
        """Logits for every token of this pass. See :meth:`hidden` for the arguments."""
        return self.unembed(self.hidden(ids, positions, segments, cache, tap), tap)

    def hidden(
        self,
        ids: Ids,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
        lengths: Tensor | None = None,
    ) -> Stream:
        """The stream after the last norm.

        Args:
            ids: token ids; what stands at a pad does not matter. [batch, query]
            positions: each token's place in its text, −1 for a pad; by default each row goes on from
                what the cache holds. [batch, query]
            segments: which document of its row a token belongs to. [batch, query]
            cache: keys and values of earlier tokens, to read and to extend (without gradients).
            tap: reads or edits what is computed on the way.
            lengths: how long each row's text is known to become, where it is read in pieces: rotary positions
                that change with the length (dynamic NTK, LongRoPE) turn the whole text alike. By default as far
                as it has been read. [batch]

        Raises:
            ContextExceeded: a position past the end of a learned table; the cache stays as it was.
        """
        if positions is None:
            past = torch.tensor(cache.lengths if cache is not None else [0], dtype=torch.long)
            positions = past[:, None] + torch.arange(ids.shape[1])
            positions = positions.expand(ids.shape[0], -1)
        limit = self.spec.position_limit
        if limit is not None and positions.numel() and int(positions.max()) >= limit:
            last = int(positions.max())
            raise ContextExceeded("past the end of the position table", expected=f"positions below {limit}", got=last)
        if cache is None:
            cache = NoCache([layer.attention.mask for layer in self.spec.decoder.layers], self.device)
        cache.begin(positions.cpu(), None if segments is None else segments.cpu())
        known = None
        if any(asks_length(layer.attention.rotary) for layer in self.spec.decoder.layers) and positions.numel():
            known = text_lengths(positions, segments) if lengths is None else lengths[:, None].expand_as(positions)
        positions = positions.to(self.device)
        x = self.embed(ids.to(self.device), positions, None if tap is None else tap.at("embed"))
        inner = None if tap is None else tap.at("decoder")
        return self.decoder(x, positions, cache, inner, self.attention, known)

    def unembed(self, x: Stream, tap: Tap | None = None) -> Logits:
        """Logits of final hidden states. [batch, query, d_model] → [batch, query, vocab]"""
        return self.head(x, self.embed.tokens, tap)

    def new_cache(self, batch: int = 1, capacity: int = 256, *, sliding: bool = True) -> StoredCache:
        """An empty cache for this model. See :func:`cutaway.cache.new_cache`."""
        return new_cache(
            self.spec.decoder, batch=batch, capacity=capacity, dtype=self.dtype, device=self.device, sliding=sliding
        )

    def compile_blocks(self, enabled: bool = True, **options: Any) -> None:
        """Run the blocks through ``torch.compile`` from now on, or no longer.

        The first passes take as long as compiling does. A pass that is watched runs uncompiled.

        Args:
            enabled: False goes back to the plain blocks.
            options: for ``torch.compile``, such as ``mode`` or ``backend``.
        """
        blocks = [block for block in self.decoder.layers if isinstance(block, Block)]
        self.decoder.runners = [*compiled_blocks(blocks, **options)] if enabled else None
