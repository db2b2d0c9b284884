"""Choosing a store for each layer."""

from __future__ import annotations

import sys

import torch

from cutaway.cache.buffers import KvDtype, check_kv_dtype
from cutaway.cache.contiguous import ContiguousStore
from cutaway.cache.cross import Source
from cutaway.cache.paged import PagedStore
from cutaway.cache.pages import PAGE, Pool
from cutaway.cache.sharing import Sharing
from cutaway.cache.sliding import SlidingStore
from cutaway.cache.stored import Store, StoredCache
from cutaway.errors import RequestError, ResourceError
from cutaway.spec import AttentionSpec, DynamicScaling, LongScaling, MaskRule, StackSpec

SLACK = 256  # tokens a ring holds beyond its window: the longest pass it takes in one write, and the furthest rewind


def new_cache(
    stack: StackSpec,
    *,
    batch: int = 1,
    capacity: int = 256,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    sliding: bool = True,
    source: Source | None = None,
    kv_dtype: KvDtype | None = None,
    paged: bool = False,
    most_pages: int | None = None,
) -> StoredCache:
    """An empty cache for a stack.

    Args:
        stack: whose layers.
        batch: rows.
        capacity: tokens of a row that fit before the buffers grow.
        dtype, device: of keys and values; the model's own.
        sliding: give layers with a window a ring; False keeps every token of every layer.
        source: what the layers read of an encoder; it is selected from with the rest.
        kv_dtype: ``"int8"`` keeps keys and values in eight bits, with a scale for each token and head, and reads them
            back as numbers of ``dtype``; what is read of a source stays as it is.
        paged: keep tokens in pages, which rows share where they have the same beginning, and give back. Layers with a
            window then keep its tokens and ``SLACK`` more, unless ``sliding`` is False.
        most_pages: of 16 tokens each, that all rows together, and their forks, may hold; None for no bound.

    Raises:
        RequestError: another ``kv_dtype``, or ``most_pages`` that are no number of pages.
        ResourceError: there is not so much memory.
    """
    if most_pages is not None and (not paged or not isinstance(most_pages, int) or most_pages < 1):
        wanted = "at least 1, with paged=True"
        raise RequestError("no number of pages", field="most_pages", expected=wanted, got=most_pages)
    check_kv_dtype(kv_dtype)
    device = torch.device(device)
    groups: dict[int | None, list[AttentionSpec]] = {}
    where: list[tuple[int | None, int, MaskRule]] = []
    for layer in stack.layers:
        attention = layer.attention
        window = attention.mask.window if sliding else None
        group = groups.setdefault(window, [])
        where.append((window, len(group), attention.mask))
        group.append(attention)
    stores: dict[int | None, Store] = {}
    room = max(1, min(batch * -(-capacity // PAGE), most_pages or sys.maxsize))
    try:
        for window, layers in groups.items():
            if paged:
                pool = Pool(layers, dtype, device, kv_dtype, room, most_pages, PAGE)
                stores[window] = PagedStore(pool, batch, window, SLACK)
            elif window is None:
                stores[window] = ContiguousStore(layers, batch, capacity, dtype, device, kv_dtype)
            else:
                stores[window] = SlidingStore(layers, batch, window, SLACK, dtype, device, kv_dtype)
    except (RuntimeError, OverflowError) as error:  # what torch says of memory that there is none of
        raise ResourceError("no memory for a cache", expected=f"{batch} × {capacity} tokens") from error
    places = [(stores[window], index, rule) for window, index, rule in where]
    found = [store for store in stores.values() if isinstance(store, PagedStore)]
    sharing = Sharing.begun(found, batch) if found and _same_for_all(stack) else None
    return StoredCache(list(stores.values()), places, batch, source, sharing)


def _same_for_all(stack: StackSpec) -> bool:
    """Whether keys and values follow from the tokens before them alone: from no source, and no text's length."""
    of_length = (DynamicScaling, LongScaling)
    return not any(
        layer.cross is not None or isinstance(getattr(layer.attention.rotary, "scaling", None), of_length)
        for layer in stack.layers
    )
