"""What a decoder reads of a text that an encoder has read: keys and values, made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.cache.mask import MaskPlan, plan_mask
from cutaway.shapes import KeyByHead, KeyPositions
from cutaway.spec import MaskRule

EVERY = MaskRule(causal=False)  # cross-attention reads the whole source


@dataclass(slots=True)
class CrossView:
    """One layer's share for one pass.

    Attributes:
        plan: who may read whom: each token of the pass every token of its source.
        k, v: keys and values of the source. [batch, kv_head, key, d_head]
    """

    plan: MaskPlan
    k: KeyByHead
    v: KeyByHead


class Source:
    """Encoded texts, one a row, as every layer's keys and values. Nothing of it changes while a decoder goes on.

    Args:
        positions: where each of the source's tokens stands, −1 for a pad; on the CPU. [batch, key]
        entries: each layer's keys and values, or None for a layer that reads no source.
        segments: which document of its row a token belongs to, if a row holds several. [batch, key]
    """

    def __init__(
        self,
        positions: KeyPositions,
        entries: Sequence[tuple[KeyByHead, KeyByHead] | None],
        segments: Tensor | None = None,
    ) -> None:
        self.positions = positions
        self.segments = segments
        self._entries = list(entries)
        self._device = next((pair[0].device for pair in self._entries if pair is not None), positions.device)
        self._plan: MaskPlan | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's source."""
        found: list[int] = (self.positions >= 0).sum(1).tolist()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return sum(tensor.nbytes for pair in self._entries if pair is not None for tensor in pair)

    def begin(self, positions: Tensor, segments: Tensor | None = None) -> None:
        """Plan a pass of the decoder: see :meth:`cutaway.cache.Cache.begin`."""
        mine = None if self.segments is None or segments is None else self.segments
        self._plan = plan_mask(EVERY, positions, self.positions, segments, mine, self._device)

    def view(self, index: int) -> CrossView | None:
        """The bundle for layer ``index`` in the pass that was begun."""
        pair = self._entries[index]
        if pair is None:
            return None
        assert self._plan is not None
        return CrossView(self._plan, *pair)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order; a row may be taken twice."""
        index = torch.tensor(rows, dtype=torch.long)
        self.positions = self.positions[index]
        self.segments = None if self.segments is None else self.segments[index]
        index = index.to(self._device)
        self._entries = [
            None if pair is None else (pair[0].index_select(0, index), pair[1].index_select(0, index))
            for pair in self._entries
        ]

    def copy(self) -> Source:
        """The same rows, to be selected from on their own."""
        return Source(self.positions, self._entries, self.segments)
