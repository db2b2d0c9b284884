"""No cache: a plain pass over whole texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.cache.cross import CrossView, Source
from cutaway.cache.mask import MaskPlan, plan_mask
from cutaway.spec import MaskRule


@dataclass(slots=True)
class PassingView:
    """Keys and values of this pass only."""

    plan: MaskPlan

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Give them back as they are."""
        return k, v


class NoCache:
    """Plans masks for a pass and remembers nothing.

    Args:
        rules: each layer's mask rule.
        device: where the model lives.
        source: what an encoder has read for each row, if the layers look at that.
    """

    def __init__(self, rules: list[MaskRule], device: torch.device, source: Source | None = None) -> None:
        self._source = source
        self._rules = rules
        self._device = device
        self._views: dict[MaskRule, PassingView] = {}

    @property
    def lengths(self) -> list[int]:
        """Nothing is held."""
        return []

    def begin(self, positions: Tensor, segments: Tensor | None = None) -> None:
        """Plan each distinct rule once."""
        if self._source is not None:
            self._source.begin(positions, segments)
        self._views = {
            rule: PassingView(plan_mask(rule, positions, positions, segments, segments, self._device))
            for rule in set(self._rules)
        }

    def layer(self, index: int) -> PassingView:
        """The plan of this layer's rule."""
        return self._views[self._rules[index]]

    def cross(self, index: int) -> CrossView | None:
        """What this layer may read of its source."""
        return None if self._source is None else self._source.view(index)

    def select(self, rows: list[int]) -> None:
        """Nothing to select from."""

    def rewind(self, lengths: list[int]) -> list[int]:
        """Nothing is left of anything."""
        return [0] * len(lengths)
