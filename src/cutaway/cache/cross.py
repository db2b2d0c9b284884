"""What a decoder reads of a text that an encoder has read: keys and values, made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.cache.mask import MaskPlan, plan_mask
from cutaway.cache.state import take
from cutaway.errors import FormatError
from cutaway.shapes import KeyByHead, KeyPositions
from cutaway.spec import MaskRule, StackSpec

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

    def state(self) -> dict[str, Tensor]:
        """All of it, as tensors for :func:`restore_source`."""
        state = {"positions": self.positions}
        if self.segments is not None:
            state["segments"] = self.segments
        pairs = ((i, pair) for i, pair in enumerate(self._entries) if pair is not None)
        return state | {f"{i}.{name}": tensor for i, pair in pairs for name, tensor in zip("kv", pair, strict=True)}


def restore_source(
    stack: StackSpec, state: Mapping[str, Tensor], batch: int, dtype: torch.dtype, device: torch.device
) -> Source:
    """The source that :meth:`Source.state` was of.

    Args:
        stack: whose layers read it.
        state: named tensors.
        batch: rows.
        dtype, device: of keys and values.

    Raises:
        ShapeMismatch: it is a source of other layers.
        FormatError: a place below −1.
    """
    positions = take(state, "positions", torch.long, (batch, None))
    if bool((positions < -1).any()):
        raise FormatError("a place below −1", field="positions")
    width = positions.shape[1]
    segments = take(state, "segments", torch.long, (batch, width)) if "segments" in state else None
    entries: list[tuple[Tensor, Tensor] | None] = []
    for i, layer in enumerate(stack.layers):
        if (cross := layer.cross) is None:
            entries.append(None)
            continue
        shape = (batch, cross.n_kv_heads, width, cross.d_head)
        k, v = (take(state, f"{i}.{name}", dtype, shape).to(device) for name in "kv")
        entries.append((k, v))
    return Source(positions, entries, segments)
