"""Writing a pass's keys and values into slots of a fixed buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.cache.mask import MaskPlan, plan_step
from cutaway.cache.state import take
from cutaway.errors import FormatError
from cutaway.spec import MaskRule


class Places(Protocol):
    """Where the tokens of a pass go in a layer's tensors, and where those lie that it may read."""

    def exchange(self, buffer: Tensor, values: Tensor, n: int) -> Tensor:
        """Write a pass's values once, and give back the ``n`` that it may read. [batch, kv_head, …, width], both."""
        ...


@dataclass(slots=True)
class Slots:
    """Places in buffers of [batch, kv_head, slot, width], where the last slot takes what has no place.

    Attributes:
        slots: where each token goes: [query] when all rows agree, else [batch, query].
        join: read the buffer as it stood with this pass after it, rather than after writing. A ring
            needs it for a pass so long that writing would overwrite what its first queries read.
    """

    slots: Tensor
    join: bool = False

    def exchange(self, buffer: Tensor, values: Tensor, n: int) -> Tensor:
        """See :class:`Places`."""
        before = torch.cat([buffer[:, :, : n - values.shape[2]], values], dim=2) if self.join else None
        if self.slots.dim() == 1:
            buffer.index_copy_(2, self.slots, values)
        else:
            rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
            buffer[rows, :, self.slots] = values.transpose(1, 2)
        return buffer[:, :, :n] if before is None else before


@dataclass(slots=True)
class SlotView:
    """A layer's tensors, and the places in them that this pass writes and reads.

    Attributes:
        plan: the mask plan; as many keys are read as it names.
        k, v: keys and values, as ``places`` has them.
        places: where they are.
    """

    plan: MaskPlan
    k: Tensor
    v: Tensor
    places: Places

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write once, and give back every key and value that a query of this pass may see."""
        n = self.plan.keys.shape[1]
        return self.places.exchange(self.k, k, n), self.places.exchange(self.v, v, n)


class SlotTable:
    """Which slot of each row holds which position: the bookkeeping that stores share, on the CPU.

    The slot after the last takes what is not to be kept; its position stays −1.

    Args:
        batch: rows.
        n_slots: slots of each row.

    Attributes:
        counted: whether each row is one text so far, whose n-th token stands at position n.
    """

    def __init__(self, batch: int, n_slots: int) -> None:
        self.n_slots = n_slots
        self.positions = torch.full((batch, n_slots + 1), -1, dtype=torch.long)
        self.segments: Tensor | None = None
        self.counted = True

    def record(self, slots: Tensor, positions: Tensor, segments: Tensor | None, count: Tensor) -> None:
        """Note what a pass writes, and whether it stands where counting would put it. All [batch, query]."""
        self.counted &= segments is None and torch.equal(positions, torch.where(positions >= 0, count, -1))
        self.positions.scatter_(1, slots, positions)
        self.positions[:, -1] = -1
        if segments is not None or self.segments is not None:
            if self.segments is None:
                self.segments = torch.zeros_like(self.positions)
            self.segments.scatter_(1, slots, torch.zeros_like(positions) if segments is None else segments)

    def advance(
        self, slots: Tensor, positions: Tensor, lengths: list[int], rules: set[MaskRule], device: torch.device
    ) -> tuple[Slots, dict[MaskRule, MaskPlan]]:
        """Note one more token in each row, and plan its pass. ``slots`` and ``positions`` are [batch, 1]"""
        # By numpy, whose code is small: the last step has pushed PyTorch's out of the processor's caches.
        table, places = self.positions.numpy(), slots.numpy()
        table[range(len(lengths)), places[:, 0]] = lengths
        need = max(lengths) + 1
        level = min(lengths) + 1 == need
        keys = torch.from_numpy(table[:, : min(need, self.n_slots)])
        plans = {rule: plan_step(rule, positions, keys, need if level else None, device) for rule in rules}
        return Slots((torch.from_numpy(places[0]) if level else slots).to(device)), plans

    def read(self, n: int) -> tuple[Tensor, Tensor | None]:
        """Positions and segments in the first ``n`` slots. [batch, n]"""
        return self.positions[:, :n].clone(), None if self.segments is None else self.segments[:, :n].clone()

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        self.positions = self.positions[rows]
        if self.segments is not None:
            self.segments = self.segments[rows]

    def join(self, rows: int) -> None:
        """More rows, with nothing in them, after these."""
        self.positions = F.pad(self.positions, (0, 0, 0, rows), value=-1)
        self.segments = None if self.segments is None else F.pad(self.segments, (0, 0, 0, rows))

    def state(self, held: Tensor) -> dict[str, Tensor]:
        """What stands in the first slots, where something is held. [batch, slot]"""
        positions, segments = self.read(held.shape[1])
        state = {"positions": positions.masked_fill(~held, -1)}
        return state if segments is None else {**state, "segments": segments.masked_fill(~held, 0)}

    def restore(self, state: Mapping[str, Tensor], held: Tensor, lengths: Tensor) -> None:
        """Put back what :meth:`state` gave; ``lengths`` are of the rows.

        Raises:
            ShapeMismatch, FormatError: it is not of these slots.
        """
        n = held.shape[1]
        positions = take(state, "positions", torch.long, tuple(held.shape))
        if not torch.equal(positions >= 0, held) or bool((positions < -1).any()):
            raise FormatError("not the slots that rows of these lengths fill", field="positions")
        self.positions[:, :n] = positions
        falls = (positions % self.n_slots == torch.arange(n)) | ~held  # where counting puts it, in a ring too
        last = torch.equal(self.positions.amax(1), lengths - 1)
        self.counted = "segments" not in state and last and bool(falls.all())
        if "segments" in state:
            self.segments = torch.zeros_like(self.positions)
            self.segments[:, :n] = take(state, "segments", torch.long, tuple(held.shape))

    def grow(self, n_slots: int) -> None:
        """Make room for more slots."""
        old, self.n_slots = self.n_slots, n_slots
        for name in ("positions", "segments"):
            table = getattr(self, name)
            if table is not None:
                wide = torch.full((table.shape[0], n_slots + 1), -1 if name == "positions" else 0, dtype=torch.long)
                wide[:, :old] = table[:, :old]
                setattr(self, name, wide)


def compact(slots: Tensor) -> Tensor:
    """One row of slots if all rows agree ([query]), else all of them ([batch, query])."""
    return slots[0] if bool((slots == slots[:1]).all()) else slots
