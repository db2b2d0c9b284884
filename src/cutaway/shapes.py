"""The words for axes, and the tensor types made of them.

========  =====================================================================
batch     rows that are computed together
query     tokens of this pass, in the order given
key       tokens a query may read: this pass's and, with a cache, earlier ones
head      query heads
kv_head   key/value heads (``head`` is a multiple of it)
d_head    width of one head
d_model   width of the residual stream
d_ff      width inside the feed-forward network
vocab     rows of the embedding table
========  =====================================================================

The types are jaxtyping's where it is installed (tests check shapes with it) and plain
``Tensor`` otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:  # jaxtyping is a development tool

        class _Plain:
            def __class_getitem__(cls, item: Any) -> type[Tensor]:
                return Tensor

        Bool = Float = Int = _Plain

Ids = Int[Tensor, "batch query"]
Positions = Int[Tensor, "batch query"]
KeyPositions = Int[Tensor, "batch key"]
Stream = Float[Tensor, "batch query d_model"]
Heads = Float[Tensor, "batch query head d_head"]
KvHeads = Float[Tensor, "batch query kv_head d_head"]
QueryByHead = Float[Tensor, "batch head query d_head"]
KeyByHead = Float[Tensor, "batch kv_head key d_head"]
Scores = Float[Tensor, "batch head query key"]
Mask = Bool[Tensor, "batch 1 query key"]
Angles = Float[Tensor, "batch query half"]
Logits = Float[Tensor, "batch query vocab"]

__all__ = [
    "Angles",
    "Heads",
    "Ids",
    "KeyByHead",
    "KeyPositions",
    "KvHeads",
    "Logits",
    "Mask",
    "Positions",
    "QueryByHead",
    "Scores",
    "Stream",
]
