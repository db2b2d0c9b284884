"""Who may read whom, from position and segment tensors alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from cutaway.shapes import KeyPositions, Mask, Positions
from cutaway.spec import MaskRule

# A pass whose (query, key) pairs number more than this gets no whole mask: attention makes it piece by piece.
LARGEST_MASK = 1 << 22


class MaskKind(Enum):
    """How a rule comes out for one pass."""

    FULL = "full"  # every query reads every key
    CAUSAL = "causal"  # query i reads keys 0..i, as many keys as queries
    RULE = "rule"  # anything else: ask the positions


@dataclass(slots=True)
class MaskPlan:
    """One rule, planned for one pass.

    Attributes:
        kind: which short cut holds.
        rule: the rule itself.
        queries, keys: positions, −1 where there is nothing. [batch, query], [batch, key]
        query_segments, key_segments: which document a token belongs to; None when each row holds one.
        mask: True where a query may read a key; made here once for all layers when small enough.
    """

    kind: MaskKind
    rule: MaskRule
    queries: Positions
    keys: KeyPositions
    query_segments: Positions | None = None
    key_segments: KeyPositions | None = None
    mask: Mask | None = None

    def piece(self, start: int, stop: int, keys: slice = slice(None)) -> Mask:
        """The mask for queries start..stop, and all keys or some. [batch, 1, stop - start, key]"""
        if self.mask is not None:
            return self.mask[:, :, start:stop, keys]
        mine, theirs = self.query_segments, self.key_segments
        mine, theirs = None if mine is None else mine[:, start:stop], None if theirs is None else theirs[:, keys]
        return allowed(self.rule, self.queries[:, start:stop], self.keys[:, keys], mine, theirs)


def allowed(
    rule: MaskRule,
    queries: Positions,
    keys: KeyPositions,
    query_segments: Positions | None = None,
    key_segments: KeyPositions | None = None,
) -> Mask:
    """True where a query may read a key. [batch, 1, query, key]

    −1 in either tensor means "nothing here" and is never True.
    """
    q, k = queries[:, None, :, None], keys[:, None, None, :]
    mask = (k >= 0) & (q >= 0)
    if rule.causal:
        mask = mask & (k <= q)
    if rule.window is not None:
        mask = mask & (k > q - rule.window)  # comparing makes booleans only, a difference whole numbers
        if not rule.causal:
            mask = mask & (k < q + rule.window)
    if rule.chunk is not None:
        mask = mask & (q // rule.chunk == k // rule.chunk)
    if query_segments is not None and key_segments is not None:
        mine, theirs = query_segments[:, None, :, None], key_segments[:, None, None, :]
        if rule.prefix:  # within the prefix of one document, order does not matter
            mask = mask | ((mine < 0) & (mine == theirs) & (k >= 0) & (q >= 0))
            mine, theirs = torch.where(mine < 0, -1 - mine, mine), torch.where(theirs < 0, -1 - theirs, theirs)
        mask = mask & (mine == theirs)
    return mask


def plan_mask(
    rule: MaskRule,
    queries: Positions,
    keys: KeyPositions,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    device: torch.device,
) -> MaskPlan:
    """Decide how ``rule`` is met in this pass. The tensors come in on the CPU and leave on ``device``."""
    kind = _kind(rule, queries, keys, query_segments)

    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    plan = MaskPlan(kind, rule, queries.to(device), keys.to(device), move(query_segments), move(key_segments))
    if kind is MaskKind.RULE and queries.numel() * keys.shape[1] <= LARGEST_MASK:
        plan.mask = plan.piece(0, queries.shape[1])
    return plan


def plan_step(
    rule: MaskRule, queries: Positions, keys: KeyPositions, length: int | None, device: torch.device
) -> MaskPlan:
    """What :func:`plan_mask` finds where each row has one query, its text's last token; without the mask.

    ``length`` is that of every text, None where they differ.
    """
    whole = length is not None and rule.chunk is None and (rule.window is None or length <= rule.window)
    kind = MaskKind.FULL if whole else MaskKind.RULE
    return MaskPlan(kind, rule, queries.to(device), keys.to(device))


def _kind(rule: MaskRule, queries: Tensor, keys: Tensor, segments: Tensor | None) -> MaskKind:
    if segments is not None or not queries.numel() or not keys.numel():
        return MaskKind.RULE
    (first, last), (oldest, newest) = (tuple(map(int, torch.aminmax(positions))) for positions in (queries, keys))
    if first < 0 or oldest < 0:
        return MaskKind.RULE
    if rule.chunk is not None and oldest // rule.chunk != max(last, newest) // rule.chunk:
        return MaskKind.RULE
    reach = max(last - oldest, 0 if rule.causal else newest - first)
    if rule.window is not None and reach >= rule.window:
        return MaskKind.RULE
    if not rule.causal or newest <= first:
        return MaskKind.FULL
    n = queries.shape[1]
    in_order = keys.shape[1] == n and bool((queries == keys).all() and (queries == first + torch.arange(n)).all())
    return MaskKind.CAUSAL if in_order else MaskKind.RULE
