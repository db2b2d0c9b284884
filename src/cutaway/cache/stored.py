"""A cache made of stores: each layer's keys lie in the kind of store that suits its mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from cutaway.cache.base import LayerView
from cutaway.cache.cross import CrossView, Source
from cutaway.cache.mask import MaskPlan
from cutaway.cache.paged import PagedStore
from cutaway.cache.sharing import Sharing
from cutaway.cache.state import inside, take, within
from cutaway.errors import FormatError, RequestError
from cutaway.spec import MaskRule


@runtime_checkable
class Advancing(Protocol):
    """A store that can plan a pass of one token in each row by itself."""

    @property
    def advances(self) -> bool: ...
    def advance(self, lengths: list[int], positions: Tensor, rules: set[MaskRule]) -> dict[MaskRule, MaskPlan]: ...


class Store(Protocol):
    """Keys and values of some layers that share slots."""

    @property
    def nbytes(self) -> int: ...
    @property
    def memory(self) -> object | None: ...
    def reserve(self, fresh: Tensor) -> None: ...
    def begin(self, positions: Tensor, segments: Tensor | None, rules: set[MaskRule]) -> dict[MaskRule, MaskPlan]: ...
    def view(self, index: int, plan: MaskPlan) -> LayerView: ...
    def select(self, rows: list[int]) -> None: ...
    def join(self, rows: int) -> None: ...
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
        sharing: by which rows read pages of others, where the stores have pages.
    """

    def __init__(
        self,
        stores: list[Store],
        places: list[tuple[Store, int, MaskRule]],
        batch: int,
        source: Source | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        self._stores = stores
        self._source = None if source is None else source.copy()
        self._places = places
        able = [store for store in stores if isinstance(store, Advancing)]
        self._advancing = able if len(able) == len(stores) else None
        self._owners = [stores.index(store) for store, _, _ in places]
        self._rules = [{rule for owner, _, rule in places if owner is store} for store in stores]
        self._sharing = sharing
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

    @property
    def free_pages(self) -> int | None:
        """Pages that rows may still take; None where there is no bound."""
        found = [store.pool.available for store in _paged(self._stores)]
        return min((n for n in found if n is not None), default=None)

    def begin(self, positions: Tensor, segments: Tensor | None = None) -> None:
        """Reserve slots and plan masks in every store.

        Raises:
            ResourceError: pages have run out; the cache holds what it held.
        """
        fresh = (positions >= 0).sum(1)
        try:
            for store in self._stores:
                store.reserve(fresh)
        except BaseException:
            for store in self._stores:
                store.rewind(self._lengths)  # gives back what the stores before had taken
            raise
        self._plans = [
            store.begin(positions, segments, rules) for store, rules in zip(self._stores, self._rules, strict=True)
        ]
        if self._source is not None:
            self._source.begin(positions, segments)
        self._lengths = [length + more for length, more in zip(self._lengths, fresh.tolist(), strict=True)]

    def advance(self) -> Tensor | None:
        """Plan a pass of one more token in each row, as :meth:`begin` would, in fewer small operations.

        Returns:
            Its positions ([batch, 1]), or None, and nothing is done, where rows are more than texts that go on.
        """
        stores = self._advancing
        if stores is None or self._source is not None or not self._lengths or not all(s.advances for s in stores):
            return None
        positions = torch.from_numpy(np.array(self._lengths, dtype=np.int64)[:, None])
        self._plans = [
            store.advance(self._lengths, positions, rules) for store, rules in zip(stores, self._rules, strict=True)
        ]
        self._lengths = [length + 1 for length in self._lengths]
        return positions

    def layer(self, index: int) -> LayerView:
        """The bundle for layer ``index``."""
        store, place, rule = self._places[index]
        return store.view(place, self._plans[self._owners[index]][rule])

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
        if self._sharing is not None:
            self._sharing.select(rows)
        self._lengths = [self._lengths[row] for row in rows]

    def join(self, rows: int, salt: bytes = b"") -> None:
        """More rows, empty, after these.

        Args:
            rows: how many.
            salt: rows take over pages from rows with the same only.

        Raises:
            RequestError: rows have a source, which new ones would lack.
        """
        if self._source is not None:
            raise RequestError("rows of an encoder–decoder begin together, with their sources", field="rows")
        for store in self._stores:
            store.join(rows)
        if self._sharing is not None:
            self._sharing.join(rows, salt)
        self._lengths += [0] * rows

    def adopt(self, row: int, tokens: Sequence[int]) -> int:
        """Take over what others have read of the same beginning, where rows share pages; how many tokens are held then.

        Args:
            row: which.
            tokens: its text from the beginning, also what it has read already.
        """
        if self._sharing is not None:
            self._lengths[row] = self._sharing.adopt(row, self._lengths[row], tokens)
        return self._lengths[row]

    def note(self, pieces: Sequence[Sequence[int]]) -> None:
        """Say which tokens the pass has read in each row, so that others may adopt them.

        Only for what the model alone made of them: no edits, and positions counted from 0.
        """
        if self._sharing is not None:
            for row, tokens in enumerate(pieces):
                self._sharing.note(row, self._lengths[row] - len(tokens), tokens)

    def fork(self, rows: list[int]) -> StoredCache:
        """These rows, in this order, in a cache of its own."""
        stores = [store.fork(rows) for store in self._stores]
        places = [(stores[i], index, rule) for i, (_, index, rule) in zip(self._owners, self._places, strict=True)]
        sharing = None if self._sharing is None else self._sharing.fork(_paged(stores), rows)
        other = StoredCache(stores, places, len(rows), self._source, sharing)
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
        if self._sharing is not None:
            self._sharing.rewind(left)
        self._lengths = left
        return list(left)


def _paged(stores: Sequence[Store]) -> list[PagedStore]:
    return [store for store in stores if isinstance(store, PagedStore)]
