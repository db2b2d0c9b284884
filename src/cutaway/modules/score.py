"""Scores of queries and keys, as every implementation of attention computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.cache import MaskPlan
from cutaway.modules.bias import score_bias
from cutaway.shapes import KeyByHead, QueryByHead, Scores
from cutaway.spec import AttentionSpec, ShawRelative


@dataclass(slots=True)
class Attending:
    """What attention needs beside queries, keys and values.

    Attributes:
        spec: heads, scale, cap, bias.
        plan: who may read whom.
        dropout: share of the weights dropped.
        table: the bias's numbers, if there is one: see ``modules.bias``.
        near_keys, near_values: Shaw's vectors for distances −max … max. [2 max + 1, d_head]
    """

    spec: AttentionSpec
    plan: MaskPlan
    dropout: float = 0.0
    table: Tensor | None = None
    near_keys: Tensor | None = None
    near_values: Tensor | None = None


def scores(q: QueryByHead, k: KeyByHead, a: Attending, queries: Tensor, keys: Tensor) -> Scores:
    """Scaled, capped and biased scores, not yet masked, of some queries and some keys.

    Args:
        q, k: [batch, head, query, d_head], [batch, kv_head, key, d_head]
        a: the rest.
        queries, keys: their positions. [batch, query], [batch, key]
    """
    spec = a.spec
    # Query head h reads key/value head h // group: fold the group beside its key/value head.
    folded = q.unflatten(1, (spec.n_kv_heads, spec.n_heads // spec.n_kv_heads))
    out = (folded @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    if spec.relative is not None and a.near_keys is not None:
        by_distance = q @ a.near_keys.t()
        out = out + by_distance.gather(-1, near_rows(spec.relative, queries, keys).expand_as(out))
    # The products, not the queries, as the reference does: in half precision they round elsewhere.
    out = out * spec.score_scale if torch.is_grad_enabled() else out.mul_(spec.score_scale)
    if spec.soft_cap is not None:
        out = torch.tanh(out / spec.soft_cap) * spec.soft_cap
    if spec.bias is not None and a.table is not None:
        out = out + score_bias(spec.bias, a.table, spec.score_scale, queries, keys).to(out.dtype)
    return out


def weighted(weights: Scores, v: KeyByHead, a: Attending, queries: Tensor, keys: Tensor) -> QueryByHead:
    """The weighted sum of values, and of Shaw's vectors where values have them. [batch, head, query, d_head]"""
    spec = a.spec
    group = spec.n_heads // spec.n_kv_heads
    out = (weights.unflatten(1, (spec.n_kv_heads, group)) @ v.unsqueeze(2)).flatten(1, 2)
    if spec.relative is not None and a.near_values is not None:
        places = near_rows(spec.relative, queries, keys).expand_as(weights)
        by_distance = weights.new_zeros(*weights.shape[:-1], a.near_values.shape[0]).scatter_add(-1, places, weights)
        out = out + by_distance @ a.near_values
    return out


def near_rows(spec: ShawRelative, queries: Tensor, keys: Tensor) -> Tensor:
    """Which of Shaw's vectors each pair takes. [batch, 1, query, key]"""
    distance = keys[:, None, None, :] - queries[:, None, :, None]
    return distance.clamp(-spec.max_distance, spec.max_distance) + spec.max_distance
