"""The two ways to compute attention, with one meaning.

``explicit`` is the readable definition and has names for its parts; ``fused`` is what runs when nobody
asks for them. Neither builds a whole query × key tensor for a long text unless its scores were asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.cache import MaskKind, MaskPlan
from cutaway.cache.mask import LARGEST_MASK
from cutaway.modules.tap import Tap
from cutaway.shapes import KeyByHead, QueryByHead
from cutaway.spec import AttentionSpec


def attend(
    q: QueryByHead, k: KeyByHead, v: KeyByHead, spec: AttentionSpec, plan: MaskPlan, dropout: float
) -> QueryByHead:
    """softmax(scale · q kᵀ + mask) v, by PyTorch's fused kernels."""
    if spec.soft_cap is not None:  # the fused kernels know no caps
        # Every head has scores of its own here.
        return _in_pieces(
            lambda piece, start, stop: explicit(piece, k, v, spec, plan, dropout, start, stop), q, k, spec.n_heads
        )
    grouped = spec.n_kv_heads != spec.n_heads
    scale = spec.score_scale
    if plan.kind is not MaskKind.RULE:
        causal = plan.kind is MaskKind.CAUSAL
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    def piecewise(piece: Tensor, start: int, stop: int) -> Tensor:
        mask = plan.piece(start, stop)
        z = F.scaled_dot_product_attention(
            piece, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
        # A query that may read nothing (a pad) gets nothing, whatever the kernel makes of an empty softmax.
        return torch.where(mask.any(-1, keepdim=True), z, 0.0)

    return _in_pieces(piecewise, q, k)


def _in_pieces(compute: Callable[[Tensor, int, int], Tensor], q: Tensor, k: Tensor, each: int = 1) -> Tensor:
    """Over slices of the queries, so small that ``each`` numbers a query and key stay within the mask's budget."""
    n = q.shape[2]
    step = max(1, LARGEST_MASK // max(1, q.shape[0] * k.shape[2] * each))
    if step >= n:
        return compute(q, 0, n)
    # Into one result: kept apart until the end, the small results would lie between the big masks that are freed
    # around them, and the heap could use none of that room again (measured: 1.2 GB more for 20,000 tokens).
    out = torch.empty_like(q)
    for i in range(0, n, step):
        out[:, :, i : i + step] = compute(q[:, :, i : i + step], i, min(i + step, n))
    return out


def explicit(
    q: QueryByHead,
    k: KeyByHead,
    v: KeyByHead,
    spec: AttentionSpec,
    plan: MaskPlan,
    dropout: float = 0.0,
    start: int = 0,
    stop: int | None = None,
    tap: Tap | None = None,
) -> QueryByHead:
    """The same, step by step, for queries start..stop of the plan.

    Taps ``scores`` (scaled, capped, masked) and ``weights``, both [batch, head, query, key].
    """
    stop = plan.queries.shape[1] if stop is None else stop
    group = spec.n_heads // spec.n_kv_heads
    mask = plan.piece(start, stop)

    # Query head h reads key/value head h // group: fold the group beside its key/value head.
    folded = q.unflatten(1, (spec.n_kv_heads, group))
    scores = (folded @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * spec.score_scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    scores = scores.masked_fill(~mask, float("-inf"))
    if tap is not None:
        scores = tap("scores", scores)

    # A pad's row is all −inf: give it finite numbers first, so that neither value nor gradient is NaN.
    readable = mask.any(-1, keepdim=True)
    weights = torch.where(readable, scores, 0.0).float().softmax(-1)
    weights = torch.where(readable, weights, 0.0).to(v.dtype)
    if tap is not None:
        weights = tap("weights", weights)
    weights = F.dropout(weights, dropout)
    return (weights.unflatten(1, (spec.n_kv_heads, group)) @ v.unsqueeze(2)).flatten(1, 2)
