"""Every token kept, in order, in buffers of fixed size."""

from __future__ import annotations

import torch
from torch import Tensor

from cutaway.cache.mask import MaskPlan, plan_mask
from cutaway.cache.slots import SlotTable, SlotView, compact
from cutaway.spec import AttentionSpec, MaskRule


class ContiguousStore:
    """Slot n of a row holds its n-th token; pads take no slot.

    The buffers double when a pass does not fit, outside any compiled region.

    Args:
        layers: the attention of each layer kept here.
        batch: rows.
        capacity: slots to begin with.
        dtype, device: of keys and values.
    """

    def __init__(
        self, layers: list[AttentionSpec], batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        self._table = SlotTable(batch, capacity)
        self._counts = torch.zeros(batch, dtype=torch.long)
        self._buffers = [
            tuple(
                torch.zeros(batch, layer.n_kv_heads, capacity + 1, layer.d_head, dtype=dtype, device=device)
                for _ in "kv"
            )
            for layer in layers
        ]
        self._slots = torch.empty(0, dtype=torch.long, device=device)

    @property
    def capacity(self) -> int:
        """Slots of each row as they stand."""
        return self._table.n_slots

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return sum(buffer.nbytes for pair in self._buffers for buffer in pair)

    def begin(self, positions: Tensor, segments: Tensor | None, rules: set[MaskRule]) -> dict[MaskRule, MaskPlan]:
        """Reserve a slot for each token and plan each rule."""
        real = positions >= 0
        rank = real.long().cumsum(1) - 1
        ends = self._counts + real.sum(1)
        need = int(ends.max()) if ends.numel() else 0
        if need > self.capacity:
            self._grow(max(need, 2 * self.capacity))
        slots = torch.where(real, self._counts[:, None] + rank, self.capacity)
        self._table.record(slots, positions, segments)
        self._counts = ends
        self._slots = compact(slots).to(self._device)
        keys, key_segments = self._table.read(need)
        if key_segments is not None and segments is None:
            segments = torch.zeros_like(positions)
        return {rule: plan_mask(rule, positions, keys, segments, key_segments, self._device) for rule in rules}

    def view(self, index: int, plan: MaskPlan) -> SlotView:
        """Bundle for the index-th layer of this store."""
        k, v = self._buffers[index]
        return SlotView(plan, k, v, self._slots)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.long)
        self._table.select(rows)
        self._counts = self._counts[index]
        index = index.to(self._device)
        self._buffers = [(k.index_select(0, index), v.index_select(0, index)) for k, v in self._buffers]

    def holds(self, row: int, length: int) -> bool:
        """Whether the row's first ``length`` tokens are all still here."""
        return length <= int(self._counts[row])

    def rewind(self, lengths: list[int]) -> None:
        """Forget all but the first tokens of each row."""
        self._counts = torch.minimum(self._counts, torch.tensor(lengths, dtype=torch.long))
        beyond = torch.arange(self.capacity + 1)[None] >= self._counts[:, None]
        self._table.positions.masked_fill_(beyond, -1)

    def _grow(self, capacity: int) -> None:
        old = self.capacity

        def wider(buffer: Tensor) -> Tensor:
            wide = buffer.new_zeros(*buffer.shape[:2], capacity + 1, buffer.shape[3])
            wide[:, :, :old] = buffer[:, :, :old]
            return wide

        # The table last: where memory runs out before, all is as it was.
        self._buffers = [(wider(k), wider(v)) for k, v in self._buffers]
        self._table.grow(capacity)
