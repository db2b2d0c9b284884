"""A cache made of stores: each layer's keys lie in the kind of store that suits its mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from cutaway.cache.base import LayerView
from cutaway.cache.cross import CrossView, Source
from cutaway.cache.mask import MaskPlan
from cutaway.cache.state import inside, take, within
from cutaway.errors import FormatError
from cutaway.spec import MaskRule


class Store(Protocol):
    """Keys and values of some layers that share slots."""

    @property
    def nbytes(self) -> int: ...
    @property
    def memory(self) -> object | None: ...
    def begin(self, positions: Tensor, segments: Tensor | None, rules: set[MaskRule]) -> dict[MaskRule, MaskPlan]: ...
    def view(self, index: int, plan: MaskPlan) -> LayerView: ...
    def select(self, rows: list[int]) -> None: ...
    def holds(self, row: int, length: int) -> bool: ...
    def rewind(self, lengths: list[int]) -> None: ...
    def fork(self, rows: list[int]) -> Store: ...
    def state(self) -> dict[str, Tensor]: ...
    def restore(self, state: Mapping[str, Tensor], lengths: Tensor) -> None: ...


class StoredCache:
    """The cache of a model.

    Args:
        stores: the distinct stores.
        places: for each layer its store, its index in that store, and its mask rule.
        batch: rows.
        source: what an encoder has read for each row, if the layers look at that.
    """

    def __init__(
        self,
        stores: list[Store],
        places: list[tuple[Store, int, MaskRule]],
        batch: int,
        source: Source | None = None,
    ) -> None:
        self._stores = stores
        self._source = None if source is None else source.copy()
        self._places = places
        self._lengths = [0] * batch
        self._plans: list[dict[MaskRule, MaskPlan]] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens held in each row."""
        return list(self._lengths)

    @property
    def source(self) -> Source | None:
        """What an encoder has read for each row."""
        return self._source

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return sum(store.nbytes for store in self._stores) + (0 if self._source is None else self._source.nbytes)

    def begin(self, positions: Tensor, segments: Tensor | None = None) -> None:
        """Reserve slots and plan masks in every store."""
        self._plans = [
            store.begin(positions, segments, {rule for owner, _, rule in self._places if owner is store})
            for store in self._stores
        ]
        if self._source is not None:
            self._source.begin(positions, segments)
        fresh = (positions >= 0).sum(1).tolist()
        self._lengths = [length + more for length, more in zip(self._lengths, fresh, strict=True)]

    def layer(self, index: int) -> LayerView:
        """The bundle for layer ``index``."""
        store, place, rule = self._places[index]
        return store.view(place, self._plans[self._stores.index(store)][rule])

    def cross(self, index: int) -> CrossView | None:
        """What layer ``index`` may read of its source."""
        return None if self._source is None else self._source.view(index)

    def memory(self) -> tuple[object, ...] | None:
        """Where keys and values lie in the pass that was begun: the same objects are the same places.

        None where what is read is not what lies there.
        """
        found = tuple(store.memory for store in self._stores)
        return None if None in found else found

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order; a row may be taken twice."""
        for store in self._stores:
            store.select(rows)
        if self._source is not None:
            self._source.select(rows)
        self._lengths = [self._lengths[row] for row in rows]

    def fork(self, rows: list[int]) -> StoredCache:
        """These rows, in this order, in a cache of its own."""
        stores = [store.fork(rows) for store in self._stores]
        places = [(stores[self._stores.index(store)], index, rule) for store, index, rule in self._places]
        other = StoredCache(stores, places, len(rows), self._source)
        if other._source is not None:
            other._source.select(rows)
        other._lengths = [self._lengths[row] for row in rows]
        return other

    def state(self) -> dict[str, Tensor]:
        """All that is held, as tensors for :meth:`restore`; the source has its own."""
        state = {"lengths": torch.tensor(self._lengths, dtype=torch.long)}
        for i, store in enumerate(self._stores):
            state |= within(f"stores.{i}", store.state())
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put what :meth:`state` gave into an empty cache of as many rows, made for the same layers.

        Raises:
            ShapeMismatch: it is the state of another model's cache.
            FormatError: it contradicts itself.
        """
        lengths = take(state, "lengths", torch.long, (len(self._lengths),))
        if bool((lengths < 0).any()):
            raise FormatError("a length below zero", field="lengths", got=lengths.tolist())
        for i, store in enumerate(self._stores):
            store.restore(inside(f"stores.{i}", state), lengths)
        self._lengths = lengths.tolist()

    def rewind(self, lengths: list[int]) -> list[int]:
        """Forget all but the first tokens of each row; 0 are left where a ring has dropped what they need."""
        wanted = [min(length, now) for length, now in zip(lengths, self._lengths, strict=True)]
        left = [
            length if all(store.holds(row, length) for store in self._stores) else 0
            for row, length in enumerate(wanted)
        ]
        for store in self._stores:
            store.rewind(left)
        self._lengths = left
        return list(left)
