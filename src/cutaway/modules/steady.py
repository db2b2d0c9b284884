"""Attention whose every sum has one order, whatever else is computed beside it.

A row of a product is the same bits for any number of rows that is a multiple of four (measured, and checked on the
model's own shapes before it is promised: see ``generation.steady``), so queries come in fours. Keys come in blocks of
a fixed size from the beginning of the text: a block's sum knows nothing of the others, and blocks are added up one
after the other. Keys that a query may not read have a weight of exactly zero and change no bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.modules.score import Attending, scores, weighted
from cutaway.shapes import KeyByHead, QueryByHead

ROWS = 4  # products are the same for any multiple of so many rows
BLOCK = 32  # keys of a block: with four queries large enough a product that one kernel does it in any company


def steady(q: QueryByHead, k: KeyByHead, v: KeyByHead, a: Attending) -> QueryByHead:
    """softmax(scores) v, with the same bits for a query in any pass, batch or piece of its text.

    Queries are a multiple of ROWS; the i-th key of a row is the i-th token of its text.
    """
    n = k.shape[2]
    short = -n % BLOCK
    k, v = F.pad(k, (0, 0, 0, short)), F.pad(v, (0, 0, 0, short))
    queries, keys = a.plan.queries, F.pad(a.plan.keys, (0, short), value=-1)
    mask = F.pad(a.plan.piece(0, queries.shape[1]), (0, short), value=False)
    readable = mask.any(-1, keepdim=True)

    blocks = [slice(i, i + BLOCK) for i in range(0, n + short, BLOCK)]
    parts = [scores(q, k[:, :, at].contiguous(), a, queries, keys[:, at]).float() for at in blocks]
    parts = [s.masked_fill(~mask[..., at], float("-inf")) for s, at in zip(parts, blocks, strict=True)]
    top = torch.stack([s.amax(-1, keepdim=True) for s in parts]).amax(0)  # a maximum has no order
    top = torch.where(readable, top, 0.0)
    total, out = torch.zeros_like(top), torch.zeros_like(q, dtype=torch.float32)
    for s, at in zip(parts, blocks, strict=True):
        weights = torch.exp(s - top)
        total = total + weights.sum(-1, keepdim=True)
        out = out + weighted(weights.to(v.dtype), v[:, :, at].contiguous(), a, queries, keys[:, at])
    return torch.where(readable, out / total.clamp(min=1e-38), 0.0).to(q.dtype)


def filled(rows: Tensor, multiple: int = ROWS, dim: int = 0) -> Tensor:
    """Rows of zeros added until there is a multiple of so many."""
    short = -rows.shape[dim] % multiple
    if not short:
        return rows
    shape = [*rows.shape]
    shape[dim] = short
    return torch.cat([rows, rows.new_zeros(shape)], dim=dim)
