"""Memory in pages: each is a row's next sixteen tokens, in every layer of a store, and several rows may read it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.cache.base import LayerView
from cutaway.cache.buffers import KvDtype, entries_of
from cutaway.cache.mask import MaskPlan
from cutaway.cache.state import take
from cutaway.errors import ResourceError
from cutaway.spec import AttentionSpec

PAGE = 16  # tokens of a page
BLOCK_PAGES = 2  # that attention takes at once: 32 keys
EMPTY, SINK = 0, 1  # pages that no row is given: read where a row has none; written where a token has no place
POISON = False  # tests set it: what is given back is filled with NaN, so that whoever still reads it is found out


@dataclass(slots=True)
class PageSlots:
    """Places in tensors of [kv_head, page, token, width], numbered over all tokens of all pages.

    Attributes:
        slots: where each token of the pass goes. [batch, query]
        reads: where those lie that it may read, in order; page EMPTY where a row has none. [batch, key]
        desk: where what is read is laid out.
    """

    slots: Tensor
    reads: Tensor
    desk: Desk

    def exchange(self, buffer: Tensor, values: Tensor, n: int) -> Tensor:
        """See :class:`cutaway.cache.slots.Places`."""
        tokens, reads = buffer.flatten(1, 2), self.reads.flatten()
        tokens.index_copy_(1, self.slots.flatten(), values.detach().transpose(0, 1).flatten(1, 2))
        if torch.compiler.is_compiling():
            found = tokens.index_select(1, reads)
        else:
            found = torch.index_select(tokens, 1, reads, out=self.desk.room(len(tokens), len(reads), tokens))
        return found.unflatten(1, self.reads.shape).transpose(0, 1)


class Desk:
    """Where what a pass reads is laid out: the same memory layer after layer.

    Memory that is new to the process costs more than what is copied there. Four sheets, so that what one layer reads
    stays until the next but one.
    """

    def __init__(self) -> None:
        self._sheets = [torch.empty(0, dtype=torch.uint8)] * 4

    def room(self, heads: int, n: int, like: Tensor) -> Tensor:
        """For as many tokens. [heads, n, width]"""
        need = heads * n * like.shape[2] * like.element_size()
        sheet = self._sheets.pop(0)
        if len(sheet) < need or sheet.device != like.device:
            sheet = torch.empty(2 * need, dtype=torch.uint8, device=like.device)
        self._sheets.append(sheet)
        return sheet[:need].view(like.dtype).view(heads, n, like.shape[2])


class Pool:
    """The pages of some layers, handed out, shared by count, and taken back.

    A page that was given back keeps what it holds, if it is known by that (see ``sharing``), until no other is left.

    Args:
        layers: the attention of each layer kept here.
        dtype, device: of keys and values.
        kv_dtype: a smaller type to keep them in.
        room: pages to make room for at first; more are made room for when needed.
        most: pages that there may ever be.
        size: tokens of a page.
    """

    def __init__(
        self,
        layers: list[AttentionSpec],
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: KvDtype | None = None,
        room: int = 16,
        most: int | None = None,
        size: int = PAGE,
    ) -> None:
        self.size = size
        self.device = device
        self.most = most
        self._view, entries = entries_of(dtype, kv_dtype)
        self._layers = [
            {
                name: torch.zeros(layer.n_kv_heads, SINK + 1, size, width or layer.d_head, dtype=kind, device=device)
                for name, kind, width in entries
            }
            for layer in layers
        ]
        self._rows = [0] * (SINK + 1)  # that hold each page
        self._free: list[int] = []
        self._kept: OrderedDict[int, None] = OrderedDict()  # given back, but known; the longest so first
        self._known: set[int] = set()
        # Called with a page that is no longer what it was known by.
        self.forget: Callable[[int], None] = self._known.discard
        self.desk = Desk()
        self.dropped: list[list[int]] = []  # pages of stores that are no more: they may end at any moment
        self._grow(room)

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page."""
        return sum(x[:, SINK].nbytes for layer in self._layers for x in layer.values())

    @property
    def used(self) -> int:
        """Pages that rows hold."""
        self._take_back()
        return len(self._rows) - SINK - 1 - len(self._free) - len(self._kept)

    @property
    def available(self) -> int | None:
        """Pages that may still be taken; None where there is no bound."""
        return None if self.most is None else self.most - self.used

    def rows(self, page: int) -> int:
        """How often it is held."""
        return self._rows[page]

    def take(self, n: int) -> list[int]:
        """Pages of zeros, held once each.

        Raises:
            ResourceError: there are not so many; nothing has changed then.
        """
        available = self.available
        if available is not None and n > available:
            raise ResourceError(
                "the cache is full",
                field="pages",
                expected=f"at most {available} more, of {self.size} tokens each",
                got=n,
                hint="Let rows go, or make the cache with more pages.",
            )
        short = n - len(self._free) - len(self._kept)
        if short > 0:
            self._grow(max(short, len(self._rows)))
        pages = []
        for _ in range(n):
            page = self._free.pop() if self._free else self._kept.popitem(last=False)[0]
            self.unknow(page)
            self._rows[page] = 1
            pages.append(page)
        self._fill(pages, zero=True)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Hold pages once more, also such as were given back and are known."""
        for page in pages:
            if page != EMPTY:
                self._kept.pop(page, None)
                self._rows[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Hold pages once less. Of those that are known, the first of these are the first to be forgotten."""
        gone = []
        for page in pages:
            if page == EMPTY:
                continue
            self._rows[page] -= 1
            if not self._rows[page] and page in self._known:
                self._kept[page] = None
            elif not self._rows[page]:
                gone.append(page)
        if POISON and gone:
            self._fill(gone, zero=False)
        self._free += gone

    def known(self, page: int) -> bool:
        """Whether rows may yet come to read it, so that it must not change."""
        return page in self._known

    def know(self, page: int) -> None:
        """It can be found by what it holds from now on."""
        self._known.add(page)

    def unknow(self, page: int) -> None:
        """It is a page like any other again."""
        if page in self._known:
            self._known.discard(page)
            self.forget(page)

    def copy(self, source: int, target: int, n: int) -> None:
        """The first tokens of one page into another."""
        for layer in self._layers:
            for x in layer.values():
                x[:, target, :n] = x[:, source, :n]

    def clear(self, page: int, start: int) -> None:
        """Zeros from some token of a page on."""
        for layer in self._layers:
            for x in layer.values():
                x[:, page, start:] = 0

    def view(self, index: int, plan: MaskPlan, places: PageSlots) -> LayerView:
        """Bundle of the index-th layer."""
        return self._view(plan, **self._layers[index], places=places)

    def packed(self, slots: Tensor) -> dict[str, Tensor]:
        """What lies in some slots, by ``layer.name``. [token] → each [token, kv_head, …]"""
        slots = slots.to(self.device)
        return {
            f"{i}.{name}": x.flatten(1, 2).index_select(1, slots).transpose(0, 1).contiguous()
            for i, layer in enumerate(self._layers)
            for name, x in layer.items()
        }

    def unpack(self, slots: Tensor, state: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`packed` gave.

        Raises:
            ShapeMismatch: a tensor is missing, or of another shape or type.
        """
        slots = slots.to(self.device)
        for i, layer in enumerate(self._layers):
            for name, x in layer.items():
                found = take(state, f"{i}.{name}", x.dtype, (len(slots), x.shape[0], x.shape[3]))
                x.flatten(1, 2).index_copy_(1, slots, found.to(self.device).transpose(0, 1))

    def _take_back(self) -> None:
        while self.dropped:
            self.release(self.dropped.pop())

    def _grow(self, more: int) -> None:
        old = len(self._rows)
        new = old + more if self.most is None else min(old + more, self.most + SINK + 1)
        for layer in self._layers:  # the count last: where memory runs out before, all is as it was
            for name, x in layer.items():
                wide = x.new_empty(x.shape[0], new, *x.shape[2:])  # takes no memory before it is written
                wide[:, :old] = x[:, :old]
                layer[name] = wide
        self._rows += [0] * (new - old)
        self._free += reversed(range(old, new))

    def _fill(self, pages: list[int], zero: bool) -> None:
        index = torch.tensor(pages, dtype=torch.long, device=self.device)
        for layer in self._layers:
            for x in layer.values():
                x.index_fill_(1, index, 0 if zero else float("nan") if x.is_floating_point() else 127)
