"""Every token kept, in order, in buffers of fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.cache.base import LayerView
from cutaway.cache.buffers import Buffers, KvDtype
from cutaway.cache.mask import MaskPlan, plan_mask
from cutaway.cache.slots import Slots, SlotTable, compact
from cutaway.cache.state import take
from cutaway.spec import AttentionSpec, MaskRule

MOST_ROOM = 4096  # tokens that a saved state may have had room for without holding a quarter of them


class ContiguousStore:
    """Slot n of a row holds its n-th token; pads take no slot.

    The buffers double when a pass does not fit, outside any compiled region.

    Args:
        layers: the attention of each layer kept here.
        batch: rows.
        capacity: slots to begin with.
        dtype, device: of keys and values.
        kv_dtype: a smaller type to keep them in.
    """

    def __init__(
        self,
        layers: list[AttentionSpec],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KvDtype | None = None,
    ) -> None:
        self._device = device
        self._table = SlotTable(batch, capacity)
        self._counts = torch.zeros(batch, dtype=torch.long)
        self._buffers = Buffers(layers, batch, capacity, dtype, device, kv_dtype)
        self._slots = Slots(torch.empty(0, dtype=torch.long, device=device))

    @property
    def capacity(self) -> int:
        """Slots of each row as they stand."""
        return self._table.n_slots

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self._buffers.nbytes

    @property
    def memory(self) -> Buffers | None:
        """The buffers, where keys and values are read as they lie there."""
        return self._buffers if self._buffers.plain else None

    def reserve(self, fresh: Tensor) -> None:
        """Make room for so many more tokens in each row."""
        need = int((self._counts + fresh).max()) if fresh.numel() else 0
        if need > self.capacity:
            self._grow(max(need, 2 * self.capacity))

    def begin(self, positions: Tensor, segments: Tensor | None, rules: set[MaskRule]) -> dict[MaskRule, MaskPlan]:
        """Give each token its slot and plan each rule."""
        real = positions >= 0
        rank = real.long().cumsum(1) - 1
        ends = self._counts + real.sum(1)
        need = int(ends.max()) if ends.numel() else 0
        count = self._counts[:, None] + rank
        slots = torch.where(real, count, self.capacity)
        self._table.record(slots, positions, segments, count)
        self._counts = ends
        self._slots = Slots(compact(slots).to(self._device))
        keys, key_segments = self._table.read(need)
        if key_segments is not None and segments is None:
            segments = torch.zeros_like(positions)
        return {rule: plan_mask(rule, positions, keys, segments, key_segments, self._device) for rule in rules}

    @property
    def advances(self) -> bool:
        """Whether :meth:`advance` can be asked: where the n-th token stands at n, in a row of one document."""
        return self._table.counted

    def advance(self, lengths: list[int], positions: Tensor, rules: set[MaskRule]) -> dict[MaskRule, MaskPlan]:
        """One more token in each row. [batch, 1]"""
        need = max(lengths) + 1
        if need > self.capacity:
            self._grow(max(need, 2 * self.capacity))
        self._counts = torch.from_numpy(self._counts.numpy() + 1)
        self._slots, plans = self._table.advance(positions, positions, lengths, rules, self._device)
        return plans

    def view(self, index: int, plan: MaskPlan) -> LayerView:
        """Bundle for the index-th layer of this store."""
        return self._buffers.view(index, plan, self._slots)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self._table.select(rows)
        self._counts = self._counts[rows]
        self._buffers = self._buffers.selected(rows)

    def join(self, rows: int) -> None:
        """More rows, empty, after these."""
        self._table.join(rows)
        self._counts = F.pad(self._counts, (0, rows))
        self._buffers = self._buffers.joined(rows)

    def fork(self, rows: list[int]) -> ContiguousStore:
        """These rows in a store of their own."""
        other = copy(self)
        other._table = copy(self._table)
        other.select(rows)
        return other

    def holds(self, row: int, length: int) -> bool:
        """Whether the row's first ``length`` tokens are all still here."""
        return length <= int(self._counts[row])

    def rewind(self, lengths: list[int]) -> None:
        """Forget all but the first tokens of each row."""
        old, self._counts = self._counts, torch.minimum(self._counts, torch.tensor(lengths, dtype=torch.long))
        slot = torch.arange(self.capacity + 1)
        beyond = slot >= self._counts[:, None]
        self._table.positions.masked_fill_(beyond, -1)
        self._buffers.clear(beyond & (slot < old[:, None]))

    def state(self) -> dict[str, Tensor]:
        """All that it takes to go on elsewhere: what is held, and no more of it than that."""
        held = torch.arange(int(self._counts.max())) < self._counts[:, None]
        table = self._table.state(held)
        return {"capacity": torch.tensor(self.capacity), **table, **self._buffers.packed(held)}

    def restore(self, state: Mapping[str, Tensor], lengths: Tensor) -> None:
        """Put what :meth:`state` gave into an empty store of as many rows.

        Raises:
            ShapeMismatch: that was a store of other layers.
            FormatError: it contradicts itself.
        """
        need = int(lengths.max())
        # As large as it was, so that sums keep their order; but no file may ask for memory that it does not fill.
        wanted = min(int(take(state, "capacity", torch.long, ())), max(4 * need, MOST_ROOM))
        if max(wanted, need) > self.capacity:
            self._grow(max(wanted, need))
        held = torch.arange(need) < lengths[:, None]
        self._table.restore(state, held, lengths)
        self._buffers.unpack(held, state)
        self._counts = lengths.clone()

    def _grow(self, capacity: int) -> None:
        # The table last: where memory runs out before, all is as it was.
        self._buffers = self._buffers.grown(capacity)
        self._table.grow(capacity)
