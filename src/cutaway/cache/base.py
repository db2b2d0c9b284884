"""What every cache promises."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from cutaway.cache.cross import CrossView
from cutaway.cache.mask import MaskPlan
from cutaway.shapes import KeyByHead


@runtime_checkable
class LayerView(Protocol):
    """One layer's bundle of tensors for one pass: no layer number, no Python state."""

    plan: MaskPlan

    def update(self, k: KeyByHead, v: KeyByHead) -> tuple[Tensor, Tensor]:
        """Write this pass's keys and values, and give back all that a query of it may read.

        Shapes: [batch, kv_head, query, d_head] in, [batch, kv_head, key, d_head] out; the keys stand in
        the order of ``plan.keys``, until the update of the next layer but one.
        """
        ...


@runtime_checkable
class Cache(Protocol):
    """Keys and values of the tokens so far, row by row."""

    @property
    def lengths(self) -> list[int]:
        """Tokens held in each row."""
        ...

    def begin(self, positions: Tensor, segments: Tensor | None = None) -> None:
        """Plan a pass: reserve slots and decide the mask plans.

        Args:
            positions: on the CPU, −1 for "nothing here". [batch, query]
            segments: which document of its row a token belongs to, if a row holds several. [batch, query]
        """
        ...

    def layer(self, index: int) -> LayerView:
        """The bundle for layer ``index`` in the pass that was begun."""
        ...

    def cross(self, index: int) -> CrossView | None:
        """What that layer may read of its source, or None where there is no source."""
        ...

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order; a row may be taken twice."""
        ...

    def rewind(self, lengths: list[int]) -> list[int]:
        """Forget all but the first tokens of each row, and say how many are left.

        That is fewer than asked (0) where a ring has already dropped what they need: feed the tokens
        from there again.
        """
        ...
