"""Choosing a store for each layer."""

from __future__ import annotations

from typing import get_args

import torch

from cutaway.cache.buffers import KvDtype
from cutaway.cache.contiguous import ContiguousStore
from cutaway.cache.cross import Source
from cutaway.cache.sliding import SlidingStore
from cutaway.cache.stored import Store, StoredCache
from cutaway.errors import RequestError
from cutaway.spec import AttentionSpec, MaskRule, StackSpec

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

    Raises:
        RequestError: another ``kv_dtype``.
    """
    if kv_dtype not in (None, *get_args(KvDtype)):
        raise RequestError(
            "no type to keep keys and values in", field="kv_dtype", expected="None or int8", got=kv_dtype
        )
    device = torch.device(device)
    groups: dict[int | None, list[AttentionSpec]] = {}
    where: list[tuple[int | None, int, MaskRule]] = []
    for layer in stack.layers:
        attention = layer.attention
        window = attention.mask.window if sliding else None
        group = groups.setdefault(window, [])
        where.append((window, len(group), attention.mask))
        group.append(attention)
    stores: dict[int | None, Store] = {
        window: ContiguousStore(layers, batch, capacity, dtype, device, kv_dtype)
        if window is None
        else SlidingStore(layers, batch, window, SLACK, dtype, device, kv_dtype)
        for window, layers in groups.items()
    }
    places = [(stores[window], index, rule) for window, index, rule in where]
    return StoredCache(list(stores.values()), places, batch, source)
