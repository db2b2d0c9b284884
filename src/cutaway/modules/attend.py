"""Three ways to compute attention, with one meaning.

``explicit`` is the readable definition and has names for its parts. ``fused`` is PyTorch's own kernels.
``blockwise`` goes over blocks of keys and keeps a running softmax: for caps and learned vectors, which the kernels
do not know, in bounded memory. No whole query × key tensor is built for a long text unless its scores were asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.cache import MaskKind
from cutaway.cache.mask import LARGEST_MASK
from cutaway.kernels import followed
from cutaway.modules.bias import score_bias
from cutaway.modules.score import Attending, scores, weighted
from cutaway.modules.tap import Tap
from cutaway.shapes import KeyByHead, QueryByHead

KEY_BLOCK = 512


def attend(q: QueryByHead, k: KeyByHead, v: KeyByHead, a: Attending) -> QueryByHead:
    """Whichever way suits: fused where the kernels can, else explicit where it is small, else block by block."""
    if a.spec.soft_cap is None and a.spec.relative is None:
        return fused(q, k, v, a)
    small = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= LARGEST_MASK
    return explicit(q, k, v, a) if small else blockwise(q, k, v, a)


def fused(q: QueryByHead, k: KeyByHead, v: KeyByHead, a: Attending) -> QueryByHead:
    """softmax(scale · q kᵀ + bias + mask) v, by PyTorch's fused kernels."""
    spec, plan = a.spec, a.plan
    scale, grouped = spec.score_scale, spec.n_kv_heads != spec.n_heads
    if plan.kind is not MaskKind.RULE and spec.bias is None:
        causal = plan.kind is MaskKind.CAUSAL
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=a.dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    def piecewise(piece: Tensor, start: int, stop: int) -> Tensor:
        mask = plan.piece(start, stop)
        readable = mask.any(-1, keepdim=True)
        if spec.bias is not None and a.table is not None:
            bias = score_bias(spec.bias, a.table, scale, plan.queries[:, start:stop], plan.keys).to(q.dtype)
            mask = torch.where(mask, bias, float("-inf"))
            mask = torch.where(readable, mask, 0.0)
        z = F.scaled_dot_product_attention(
            piece, k, v, attn_mask=mask, dropout_p=a.dropout, scale=scale, enable_gqa=grouped
        )
        # A query that may read nothing (a pad) gets nothing, whatever the kernel makes of an empty softmax.
        return torch.where(readable, z, 0.0)

    return _in_pieces(piecewise, q, k.shape[2], 1 if spec.bias is None else spec.n_heads)


def _in_pieces(compute: Callable[[Tensor, int, int], Tensor], q: Tensor, n_keys: int, each: int) -> Tensor:
    """Over slices of the queries, so small that ``each`` numbers a query and key stay within the mask's budget."""
    n = q.shape[2]
    step = max(1, LARGEST_MASK // max(1, q.shape[0] * n_keys * each))
    if step >= n:
        return compute(q, 0, n)
    # Into one result: kept apart until the end, the small results would lie between the big masks that are freed
    # around them, and the heap could use none of that room again (measured: 1.2 GB more for 20,000 tokens).
    out = torch.empty_like(q)
    for i in range(0, n, step):
        out[:, :, i : i + step] = compute(q[:, :, i : i + step], i, min(i + step, n))
    return out


def explicit(q: QueryByHead, k: KeyByHead, v: KeyByHead, a: Attending, tap: Tap | None = None) -> QueryByHead:
    """The same, step by step. Taps ``scores`` (scaled, capped, biased, masked) and ``weights``.

    Both are [batch, head, query, key].
    """
    queries, keys = a.plan.queries, a.plan.keys
    mask = a.plan.piece(0, queries.shape[1])
    s = scores(q, k, a, queries, keys).masked_fill_(~mask, float("-inf"))
    kept = tap is not None and tap.wants("scores")
    if tap is not None and kept:
        s = tap("scores", s)
    # Nobody else has them: the weights may lie where they lie.
    free = not kept and not torch.is_grad_enabled() and not followed(s)
    over = free and s.device.type == "cpu" and s.dtype is torch.float32
    if a.plan.kind is not MaskKind.RULE:
        weights = torch.softmax(s, -1, out=s) if over else s.float().softmax(-1).to(v.dtype)
    else:
        # A pad's row is all −inf: give it finite numbers first, so that neither value nor gradient is NaN.
        readable = mask.any(-1, keepdim=True)
        weights = torch.where(readable, s, 0.0).float().softmax(-1)
        weights = torch.where(readable, weights, 0.0).to(v.dtype)
    del s
    if tap is not None:
        weights = tap("weights", weights)
    return weighted(F.dropout(weights, a.dropout), v, a, queries, keys)


def blockwise(q: QueryByHead, k: KeyByHead, v: KeyByHead, a: Attending) -> QueryByHead:
    """The same over blocks of keys with a running maximum and sum (Milakov & Gimelshein 2018; Dao et al. 2022)."""

    def piecewise(piece: Tensor, start: int, stop: int) -> Tensor:
        queries = a.plan.queries[:, start:stop]
        high = piece.new_full((*piece.shape[:-1], 1), float("-inf"), dtype=torch.float32)
        total, out = torch.zeros_like(high), torch.zeros_like(piece, dtype=torch.float32)
        for i in range(0, k.shape[2], KEY_BLOCK):
            block, keys = slice(i, i + KEY_BLOCK), a.plan.keys[:, i : i + KEY_BLOCK]
            allowed = a.plan.piece(start, stop, block)
            if not bool(allowed.any()):
                continue
            s = scores(piece, k[:, :, block], a, queries, keys).float().masked_fill(~allowed, float("-inf"))
            top = torch.maximum(high, s.detach().amax(-1, keepdim=True))
            safe = torch.where(top.isinf(), 0.0, top)  # rows that have read nothing yet
            weights, kept = torch.exp(s - safe), torch.exp(high - safe)
            total = total * kept + weights.sum(-1, keepdim=True)
            part = weighted(F.dropout(weights, a.dropout).to(v.dtype), v[:, :, block], a, queries, keys)
            out, high = out * kept + part, top
        return torch.where(total > 0, out / total.clamp(min=1e-38), 0.0).to(q.dtype)

    return _in_pieces(piecewise, q, min(KEY_BLOCK, k.shape[2]), a.spec.n_heads)
