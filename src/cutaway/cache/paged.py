"""Tokens in pages of a pool: rows share what they have in common, and take and give back memory page by page."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.cache.base import LayerView
from cutaway.cache.mask import MaskPlan, plan_mask
from cutaway.cache.pages import BLOCK_PAGES, EMPTY, SINK, PageSlots, Pool
from cutaway.cache.slots import SlotTable
from cutaway.cache.state import take
from cutaway.errors import FormatError, ShapeMismatch
from cutaway.spec import MaskRule


class PagedStore:
    """Token n of a row lies in the row's page ``n // size``.

    A page that others read too is copied before it is written: at most one of each row, the last. Where the layers
    see no further than a window, the pages that no later token may read are given back.

    Args:
        pool: where the pages are.
        batch: rows.
        window: tokens that the widest of the layers may see, its own among them; None for all.
        slack: tokens beyond the window that are kept, so that a row can be rewound by so many.
    """

    def __init__(self, pool: Pool, batch: int, window: int | None = None, slack: int = 0) -> None:
        self.pool = pool
        self._size = pool.size
        self._window = window
        self._slack = slack
        self._table = SlotTable(batch, 0)
        self._counts = torch.zeros(batch, dtype=torch.long)
        # Each row's pages from its first token on; EMPTY where one was given back.
        self._rows: list[list[int]] = [[] for _ in range(batch)]
        self._stale = [False] * batch  # whether there is something after the last token, in its page
        self._places = PageSlots(torch.empty(0, 0), torch.empty(0, 0), pool.desk)
        weakref.finalize(self, _drop, pool.dropped, self._rows).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take: pages that rows share count once."""
        return len({page for row in self._rows for page in row} - {EMPTY}) * self.pool.page_nbytes

    def page(self, row: int, index: int) -> int:
        """The row's index-th page; EMPTY where it was given back."""
        return self._rows[row][index]

    def first(self, length: int) -> int:
        """The first page that a row of that length must have, to go on."""
        return 0 if self._window is None else max(length - self._window + 1, 0) // self._size

    @property
    def memory(self) -> None:
        """Pages are gathered before they are read."""
        return None

    def reserve(self, fresh: Tensor) -> None:
        """Make room for so many more tokens in each row.

        Raises:
            ResourceError: there are no more pages; rows hold what they held.
        """
        self._give_back()
        counts, news = self._counts.tolist(), fresh.tolist()
        short = [max(0, self._needed(n + new) - len(row)) for n, new, row in zip(counts, news, self._rows, strict=True)]
        partial = [row for row, new in enumerate(news) if new and counts[row] % self._size]
        copied = self._to_copy(partial)
        pages = self.pool.take(len(copied) + sum(short))
        for row in partial:
            n = counts[row]
            place, old = n // self._size, self._rows[row][n // self._size]
            if row in copied:
                self.pool.copy(old, page := pages.pop(), n % self._size)
                self._rows[row][place] = page
                self.pool.release([old])
            elif self._stale[row]:
                self.pool.clear(old, n % self._size)
            self._stale[row] = False
        for row, n in enumerate(short):
            self._rows[row] += [pages.pop() for _ in range(n)]

    def begin(self, positions: Tensor, segments: Tensor | None, rules: set[MaskRule]) -> dict[MaskRule, MaskPlan]:
        """Give each token its slot and plan each rule."""
        real = positions >= 0
        before, self._counts = self._counts, self._counts + real.sum(1)
        need = int(self._counts.max()) if self._counts.numel() else 0
        if need > self._table.n_slots:
            self._table.grow(max(need, 2 * self._table.n_slots))
        token = torch.where(real, before[:, None] + real.long().cumsum(1) - 1, self._table.n_slots)
        self._table.record(token, positions, segments, token)

        # From a whole number of attention's blocks on, so that a sum's order does not depend on what was given back.
        first = [self.first(n) // BLOCK_PAGES * BLOCK_PAGES for n in before.tolist()]
        start = self._size * torch.tensor(first, dtype=torch.long)
        n = max((self._counts - start).tolist(), default=0)
        reads = self._slots(first, max(n, 1))
        slots = reads.gather(1, (token - start[:, None]).clamp(max=reads.shape[1] - 1))
        slots = torch.where(real, slots, self._size * SINK)
        device = self.pool.device
        # Laid out by its own size: a graph would be bound to the strides of a slice.
        reads = reads[:, :n].clone(memory_format=torch.contiguous_format)
        self._places = PageSlots(slots.to(device), reads.to(device), self.pool.desk)

        held = (start[:, None] + torch.arange(n)).clamp(max=self._table.n_slots)
        keys = self._table.positions.gather(1, held)
        key_segments = None if self._table.segments is None else self._table.segments.gather(1, held)
        if key_segments is not None and segments is None:
            segments = torch.zeros_like(positions)
        return {rule: plan_mask(rule, positions, keys, segments, key_segments, device) for rule in rules}

    def view(self, index: int, plan: MaskPlan) -> LayerView:
        """Bundle for the index-th layer of this store."""
        return self.pool.view(index, plan, self._places)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order. Nothing is copied."""
        chosen = [list(self._rows[row]) for row in rows]
        for row in chosen:
            self.pool.hold(row)
        gone, self._rows[:] = list(self._rows), chosen
        for row in gone:
            self.pool.release(reversed(row))
        self._table.select(rows)
        self._counts = self._counts[rows]
        self._stale = [self._stale[row] for row in rows]

    def join(self, rows: int) -> None:
        """More rows, empty, after these. Nothing is copied."""
        self._table.join(rows)
        self._counts = F.pad(self._counts, (0, rows))
        self._rows += [[] for _ in range(rows)]
        self._stale += [False] * rows

    def fork(self, rows: list[int]) -> PagedStore:
        """These rows in a store of their own, over the same pool."""
        other = PagedStore(self.pool, 0, self._window, self._slack)
        for row in rows:
            self.pool.hold(self._rows[row])
            other._rows.append(list(self._rows[row]))
        other._table.n_slots = self._table.n_slots
        other._table.positions, other._table.segments = self._table.positions, self._table.segments
        other._table.select(rows)
        other._counts = self._counts[rows]
        other._stale = [self._stale[row] for row in rows]
        return other

    def adopt(self, row: int, pages: list[int]) -> None:
        """Have a row read these pages, from its first token on, in the place of its own."""
        self.pool.hold(pages)
        self.pool.release(reversed(self._rows[row]))
        self._rows[row][:] = pages
        n = self._size * len(pages)
        self._counts[row], self._stale[row] = n, False
        if n > self._table.n_slots:
            self._table.grow(n)
        self._table.positions[row, :n] = torch.arange(n)
        if self._table.segments is not None:
            self._table.segments[row, :n] = 0

    def holds(self, row: int, length: int) -> bool:
        """Whether the tokens that position ``length`` may see are all still here."""
        return length <= int(self._counts[row]) and EMPTY not in self._rows[row][self.first(length) :]

    def rewind(self, lengths: list[int]) -> None:
        """Forget all but the first tokens of each row, and give back their pages."""
        wanted = torch.minimum(self._counts, torch.tensor(lengths, dtype=torch.long))
        for row, (new, old) in enumerate(zip(wanted.tolist(), self._counts.tolist(), strict=True)):
            gone = self._rows[row][self._needed(new) :]
            del self._rows[row][self._needed(new) :]
            self.pool.release(reversed(gone))
            self._stale[row] = bool(new % self._size) and (self._stale[row] or new < old)
        self._counts = wanted
        beyond = torch.arange(self._table.n_slots + 1)[None] >= wanted[:, None]
        self._table.positions = self._table.positions.masked_fill(beyond, -1)

    def state(self) -> dict[str, Tensor]:
        """All that it takes to go on elsewhere: what is held, and no more of it than that."""
        first = torch.tensor([sum(page == EMPTY for page in row) for row in self._rows], dtype=torch.long)
        held = self._held(self._counts, first)
        packed = self.pool.packed(self._slots([0] * len(held), held.shape[1])[held])
        return {"page": torch.tensor(self._size), "first": first, **self._table.state(held), **packed}

    def restore(self, state: Mapping[str, Tensor], lengths: Tensor) -> None:
        """Put what :meth:`state` gave into an empty store of as many rows; what rows shared, each then has.

        Raises:
            ShapeMismatch: that was a store of other layers, or of other pages.
            FormatError: it contradicts itself.
            ResourceError: there are not so many pages.
        """
        size = int(take(state, "page", torch.long, ()))
        if size != self._size:
            raise ShapeMismatch("pages of another size", field="page", expected=self._size, got=size)
        first = take(state, "first", torch.long, (len(lengths),))
        most = torch.tensor([self.first(n) for n in lengths.tolist()], dtype=torch.long)
        if bool(((first < 0) | (first > most)).any()):
            raise FormatError("cannot be for rows of this length", field="first", got=first.tolist())
        need = int(lengths.max())
        if need > self._table.n_slots:
            self._table.grow(need)
        held = self._held(lengths, first)
        self._table.restore(state, held, lengths)
        for row, (n, start) in enumerate(zip(lengths.tolist(), first.tolist(), strict=True)):
            self._rows[row] += [EMPTY] * start
            self._rows[row] += self.pool.take(self._needed(n) - start)
        self._counts = lengths.clone()
        self.pool.unpack(self._slots([0] * len(held), need)[held], state)

    def _to_copy(self, rows: list[int]) -> list[int]:
        """Those of these rows, about to write into their last page, that others read, or may come to."""
        last = {row: self._rows[row][int(self._counts[row]) // self._size] for row in rows}
        writers = Counter(last.values())
        # Where only rows that write are left, one of them need not copy.
        owner = {p: row for row, p in last.items() if self.pool.rows(p) == writers[p] and not self.pool.known(p)}
        return [row for row, page in last.items() if owner.get(page) != row]

    def _give_back(self) -> None:
        """Pages that are out of every later token's reach, and of a rewind's."""
        if self._window is None:
            return
        for row, n in zip(self._rows, self._counts.tolist(), strict=True):
            place = self.first(max(n - self._slack, 0)) - 1
            while place >= 0 and row[place] != EMPTY:
                page, row[place] = row[place], EMPTY
                self.pool.release([page])
                place -= 1

    def _slots(self, first: list[int], n: int) -> Tensor:
        """Where in the pool so many tokens of each row lie, from some page on; EMPTY where there is none. [batch, n]"""
        width = self._needed(n)
        read = [row[start : start + width] for row, start in zip(self._rows, first, strict=True)]
        filled = [row + [EMPTY] * (width - len(row)) for row in read]
        pages = torch.tensor(filled, dtype=torch.long).view(len(filled), width)
        return (self._size * pages[..., None] + torch.arange(self._size)).flatten(1)[:, :n]

    def _held(self, counts: Tensor, first: Tensor) -> Tensor:
        """Which tokens are here. [batch, token]"""
        token = torch.arange(int(counts.max()))
        return (token < counts[:, None]) & (token >= self._size * first[:, None])

    def _needed(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // self._size)


def _drop(dropped: list[list[int]], rows: list[list[int]]) -> None:
    """A store is no more: the pool takes its pages back when it is next asked."""
    dropped += [row[::-1] for row in rows]
