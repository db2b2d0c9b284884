"""Keys and values of earlier tokens, answered in positions.

A pass runs in two phases. :meth:`Cache.begin` plans once, outside any compiled region: it
reserves slots and decides how each mask rule is met. :meth:`Cache.layer` then hands a block
its bundle of tensors, and the block does pure tensor work with it.
"""

from cutaway.cache.base import Cache, LayerView
from cutaway.cache.buffers import KvDtype, check_kv_dtype
from cutaway.cache.build import new_cache
from cutaway.cache.contiguous import ContiguousStore
from cutaway.cache.cross import CrossView, Source, restore_source
from cutaway.cache.mask import MaskKind, MaskPlan, allowed
from cutaway.cache.paged import PagedStore
from cutaway.cache.passing import NoCache
from cutaway.cache.sliding import SlidingStore
from cutaway.cache.stored import StoredCache

__all__ = [
    "Cache",
    "ContiguousStore",
    "CrossView",
    "KvDtype",
    "LayerView",
    "MaskKind",
    "MaskPlan",
    "NoCache",
    "PagedStore",
    "SlidingStore",
    "Source",
    "StoredCache",
    "allowed",
    "check_kv_dtype",
    "new_cache",
    "restore_source",
]
