"""Biases on the scores by how far a key is from its query."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cutaway.modules.part import Part
from cutaway.shapes import KeyPositions, Positions
from cutaway.spec import AlibiBias, BucketBias


def alibi_slopes(n_heads: int, spec: AlibiBias) -> Tensor:
    """How much each head lowers a score for one position of distance (Press et al. 2022). [head]

    >>> alibi_slopes(4, AlibiBias())
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """

    def powers(n: int) -> Tensor:
        return 2.0 ** (-spec.max_bias / n * torch.arange(1, n + 1, dtype=torch.float32))

    below = 1 << (n_heads.bit_length() - 1)
    if below == n_heads:
        return powers(n_heads)
    # In-between slopes are every second of those that twice as many heads would have.
    above = powers(2 * below)
    if spec.order == "append":
        return torch.cat([powers(below), above[0::2][: n_heads - below]])
    return torch.cat([above[1::2], above[0::2]])[:n_heads]


def buckets(distance: Tensor, spec: BucketBias) -> Tensor:
    """The bucket of each key-minus-query distance (Raffel et al. 2020, appendix of the code).

    >>> buckets(torch.tensor([-200, -20, -1, 0, 1, 20]), BucketBias(32, 128, both_ways=True))
    tensor([15, 10,  1,  0, 17, 26])
    """
    n, offset = spec.n_buckets, torch.zeros_like(distance)
    if spec.both_ways:
        n //= 2
        offset = (distance > 0).long() * n
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = n // 2
    # Past the exact ones, buckets grow as the logarithm does, up to max_distance.
    growing = torch.log(distance.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact) * (n - exact)
    far = (exact + growing.long()).clamp(max=n - 1)
    return offset + torch.where(distance < exact, distance, far)


class ScoreBias(Part):
    """A bias spec with its numbers: fixed slopes, or a learned table.

    Args:
        spec: which bias.
        n_heads: heads it differs by.
    """

    def __init__(self, spec: AlibiBias | BucketBias, n_heads: int) -> None:
        super().__init__()
        self.spec = spec
        self.n_heads = n_heads
        self.weight = nn.Parameter(torch.empty(spec.n_buckets, n_heads)) if isinstance(spec, BucketBias) else None

    def table(self, device: torch.device) -> Tensor:
        """What :func:`score_bias` reads: slopes [head], or the table [bucket, head]."""
        if self.weight is not None:
            return self.weight
        assert isinstance(self.spec, AlibiBias)
        with torch.device("cpu"):
            return alibi_slopes(self.n_heads, self.spec).to(device)


def score_bias(
    spec: AlibiBias | BucketBias, table: Tensor, scale: float, queries: Positions, keys: KeyPositions
) -> Tensor:
    """What is added to scaled scores. [batch, head, query, key]

    Args:
        spec: which bias.
        table: see :meth:`ScoreBias.table`.
        scale: the scores' own, for a bias that is added before it.
        queries, keys: positions. [batch, query], [batch, key]
    """
    if isinstance(spec, BucketBias):
        distance = keys[:, None, :] - queries[:, :, None]
        return table[buckets(distance, spec)].permute(0, 3, 1, 2)
    if spec.half:  # rounded as the product of the slope and the key's place in the text
        bias = (table.bfloat16()[None, :, None] * keys[:, None, :]).float()[:, :, None, :]
    else:
        bias = table[None, :, None, None] * -(keys[:, None, None, :] - queries[:, None, :, None]).abs()
    return bias * scale if spec.scaled else bias
