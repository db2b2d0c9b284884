"""Only the last tokens kept: a ring for layers that see no further than a window."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.cache.base import LayerView
from cutaway.cache.buffers import Buffers, KvDtype
from cutaway.cache.mask import MaskPlan, plan_mask
from cutaway.cache.slots import Slots, SlotTable, compact
from cutaway.cache.state import take
from cutaway.errors import FormatError, ShapeMismatch
from cutaway.spec import AttentionSpec, MaskRule


class SlidingStore:
    """Token n of a row lies in slot ``n % (window + slack)``, over the one that lay there before.

    The slack lets a pass of up to that many tokens be written before it is read, and a row be rewound by
    that many tokens. A longer pass is read beside the ring instead.

    Args:
        layers: the attention of each layer kept here.
        batch: rows.
        window: tokens that the widest of the layers may see, its own among them.
        slack: slots beyond the window.
        dtype, device: of keys and values.
        kv_dtype: a smaller type to keep them in.
    """

    def __init__(
        self,
        layers: list[AttentionSpec],
        batch: int,
        window: int,
        slack: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KvDtype | None = None,
    ) -> None:
        self._window = window
        self._size = window + slack
        self._slack = slack
        self._device = device
        self._table = SlotTable(batch, self._size)
        self._counts = torch.zeros(batch, dtype=torch.long)
        # The longest each row has been: what lies further back than the ring from there is overwritten.
        self._highest = torch.zeros(batch, dtype=torch.long)
        self._buffers = Buffers(layers, batch, self._size, dtype, device, kv_dtype)
        self._slots = Slots(torch.empty(0, dtype=torch.long, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self._buffers.nbytes

    @property
    def memory(self) -> Buffers | None:
        """The buffers, where keys and values are read as they lie there."""
        return self._buffers if self._buffers.plain and not self._slots.join else None

    def reserve(self, fresh: Tensor) -> None:
        """A ring has all the room that it will have."""

    def begin(self, positions: Tensor, segments: Tensor | None, rules: set[MaskRule]) -> dict[MaskRule, MaskPlan]:
        """Give each token its slot, decide whether the ring can be written before it is read, and plan each rule."""
        real = positions >= 0
        before, fresh = self._counts, real.sum(1)
        n_before = min(int(before.max()), self._size)
        join = bool((fresh > self._slack).any())
        past = self._table.read(n_before)

        rank = real.long().cumsum(1) - 1
        kept = real & (rank >= (fresh - self._size)[:, None])
        count = before[:, None] + rank
        slots = torch.where(kept, count % self._size, self._size)
        self._table.record(slots, positions, segments, count)
        self._counts = before + fresh
        self._highest = torch.maximum(self._highest, self._counts)
        self._slots = Slots(compact(slots).to(self._device), join)

        if join:
            keys = torch.cat([past[0], positions], dim=1)
            key_segments = None
            if segments is not None or past[1] is not None:
                old = torch.zeros_like(past[0]) if past[1] is None else past[1]
                key_segments = torch.cat([old, torch.zeros_like(positions) if segments is None else segments], dim=1)
        else:
            keys, key_segments = self._table.read(min(int(self._counts.max()), self._size))
        if key_segments is not None and segments is None:
            segments = torch.zeros_like(positions)
        return {rule: plan_mask(rule, positions, keys, segments, key_segments, self._device) for rule in rules}

    @property
    def advances(self) -> bool:
        """Whether :meth:`advance` can be asked: where the n-th token stands at n, in a row of one document."""
        return self._table.counted and self._slack > 0

    def advance(self, lengths: list[int], positions: Tensor, rules: set[MaskRule]) -> dict[MaskRule, MaskPlan]:
        """One more token in each row. [batch, 1]"""
        counts = self._counts.numpy() + 1
        self._counts, self._highest = (
            torch.from_numpy(counts),
            torch.from_numpy(np.maximum(self._highest.numpy(), counts)),
        )
        slots = positions if max(lengths) < self._size else positions % self._size
        self._slots, plans = self._table.advance(slots, positions, lengths, rules, self._device)
        return plans

    def view(self, index: int, plan: MaskPlan) -> LayerView:
        """Bundle for the index-th layer of this store."""
        return self._buffers.view(index, plan, self._slots)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self._table.select(rows)
        self._counts, self._highest = self._counts[rows], self._highest[rows]
        self._buffers = self._buffers.selected(rows)

    def join(self, rows: int) -> None:
        """More rows, empty, after these."""
        self._table.join(rows)
        self._counts, self._highest = F.pad(self._counts, (0, rows)), F.pad(self._highest, (0, rows))
        self._buffers = self._buffers.joined(rows)

    def fork(self, rows: list[int]) -> SlidingStore:
        """These rows in a store of their own."""
        other = copy(self)
        other._table = copy(self._table)
        other.select(rows)
        return other

    def holds(self, row: int, length: int) -> bool:
        """Whether the tokens that position ``length`` may see are all still here."""
        oldest = int(self._highest[row]) - self._size
        return length <= int(self._counts[row]) and max(length - self._window + 1, 0) >= oldest

    def rewind(self, lengths: list[int]) -> None:
        """Forget all but the first tokens of each row."""
        wanted = torch.minimum(self._counts, torch.tensor(lengths, dtype=torch.long))
        cleared = torch.zeros_like(self._table.positions, dtype=torch.bool)
        # In a ring, slots and order differ: walk back over the tokens that go.
        for row, (new, old) in enumerate(zip(wanted.tolist(), self._counts.tolist(), strict=True)):
            gone = torch.arange(max(new, old - self._size), old) % self._size
            self._table.positions[row, gone] = -1
            cleared[row, gone] = True
            if new == 0:
                self._highest[row] = 0
        self._buffers.clear(cleared)
        self._counts = wanted

    def state(self) -> dict[str, Tensor]:
        """All that it takes to go on elsewhere: what is held, and no more of it than that."""
        held = self._held(self._counts, self._highest)
        table = self._table.state(held)
        size = torch.tensor(self._size)
        return {"size": size, "highest": self._highest, **table, **self._buffers.packed(held)}

    def restore(self, state: Mapping[str, Tensor], lengths: Tensor) -> None:
        """Put what :meth:`state` gave into an empty store of as many rows.

        Raises:
            ShapeMismatch: that was a store of other layers, or a ring of another size.
            FormatError: it contradicts itself.
        """
        size = int(take(state, "size", torch.long, ()))
        if size != self._size:
            raise ShapeMismatch("a ring of another size", field="size", expected=self._size, got=size)
        highest = take(state, "highest", torch.long, (len(lengths),))
        # Each row was as long as it is, or longer once; an empty one begins anew.
        if bool(((highest < lengths) | ((lengths == 0) & (highest > 0))).any()):
            raise FormatError("cannot be for rows of this length", field="highest", got=highest.tolist())
        held = self._held(lengths, highest)
        self._table.restore(state, held, lengths)
        self._buffers.unpack(held, state)
        self._counts, self._highest = lengths.clone(), highest.clone()

    def _held(self, counts: Tensor, highest: Tensor) -> Tensor:
        """Which slots hold a token: those up to each row's length that were not written over. [batch, slot]"""
        slot = torch.arange(min(int(counts.max()), self._size))
        # The last token that was ever written to a slot, and the one a ring further back.
        last = highest[:, None] - 1 - (highest[:, None] - 1 - slot) % self._size
        return (last < counts[:, None]) & (last >= 0)
