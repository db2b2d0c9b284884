"""What a pass reads, as the native library is told of it: which tokens, in which slots, with which angles."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cutaway.cache import MaskPlan
from cutaway.kernels import layout as c


class Tokens:
    """Which tokens a pass has, and where: pads (−1) are left out.

    Args:
        queries: positions. [batch, query]
    """

    def __init__(self, queries: Tensor) -> None:
        self.batch, self.n = queries.shape
        flat = queries.reshape(-1)
        self.whole = int(flat.amin()) >= 0
        if self.whole:
            (self.places, self.rows), self.positions = tokens_of(self.batch, self.n), flat.contiguous()
        else:
            self.places = (flat >= 0).nonzero()[:, 0]
            self.rows, self.positions = self.places // self.n, flat[self.places]
        self.count = len(self.places)

    def ends(self) -> Tensor:
        """The last of each row that has one, among those that are there."""
        return torch.bincount(self.rows, minlength=1).cumsum(0)[self.rows.unique()] - 1

    def slots(self, slots: Tensor) -> Tensor:
        """A slot for each token, of one for each query, or for each row and query."""
        flat = slots.expand(self.batch, self.n).reshape(-1)
        return flat.contiguous() if self.whole else flat[self.places]


@lru_cache(maxsize=64)
def tokens_of(batch: int, n: int) -> tuple[Tensor, Tensor]:
    """Places and rows where no token is a pad. Nobody writes to them."""
    places = torch.arange(batch * n)
    return places, places // n


class Groups:
    """What some layers share: each distinct plan, row of slots and table of angles is laid out once in a pass.

    Args:
        tokens: of the pass.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._known: dict[tuple[int, int, int], int] = {}
        self._structs: list[c.Group] = []
        self._held: list[object] = []  # memory that the structs point to

    def add(self, plan: MaskPlan, slots: Tensor, rotary: tuple[Tensor, Tensor] | None) -> int:
        """The group's place."""
        key = (id(plan), id(slots), id(rotary))
        if key not in self._known:
            self._known[key] = len(self._structs)
            keys, mine = plan.keys.expand(self._tokens.batch, -1), self._tokens.slots(slots)
            assert keys.stride(1) == 1
            struct = c.Group(
                slots=mine.data_ptr(), count=keys.shape[1], positions=keys.data_ptr(), apart=keys.stride(0)
            )
            self._held += [plan, slots, rotary, keys, mine]
            if rotary is not None:
                cos, sin = (table.expand(self._tokens.batch, -1, -1).contiguous() for table in rotary)
                struct.cos, struct.sin = cos.data_ptr(), sin.data_ptr()
                self._held += [cos, sin]
            self._structs.append(struct)
        return self._known[key]

    def array(self) -> Any:
        """All of them."""
        return (c.Group * len(self._structs))(*self._structs)
