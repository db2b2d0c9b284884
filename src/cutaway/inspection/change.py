"""An edit that knows where it takes hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from cutaway.inspection.where import Place, Where


@runtime_checkable
class Changed(Protocol):
    """What makes of a quantity, knowing where it is, what the computation goes on with."""

    def change(self, value: Tensor, place: Place) -> Tensor:
        """Something of the same shape and type, on the same device."""
        ...


Edit: TypeAlias = Callable[[Tensor], Tensor] | Changed
# New numbers, to be broadcast to the quantity's shape, and which of them there are, if not all.
Made: TypeAlias = Callable[[Tensor, Place, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Change:
    """New numbers in part of a quantity. What is not part of it keeps its bits.

    Attributes:
        what: a word for it.
        where: the part.
        made: from the quantity, its place and the part's mask to new numbers.
    """

    what: str
    where: Where
    made: Made

    def change(self, value: Tensor, place: Place) -> Tensor:
        """See :class:`Changed`."""
        mask = self.where.mask(value, place)
        new, there = self.made(value, place, mask)
        return torch.where(mask if there is None else mask & there, new.to(value), value)
