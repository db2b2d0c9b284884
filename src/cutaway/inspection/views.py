"""What a head looks for and what it writes, token by token, from its weights alone: its QK and OV circuits.

Elhage et al. 2021, https://transformer-circuits.pub/2021/framework. Nothing is run: each token stands for itself, as
its row of the embedding table through the norm that the head reads through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from cutaway.cache import MaskKind, MaskPlan
from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids, whole
from cutaway.inspection.circuit import ALONE, embedded, evened, head_of, output_columns, tokens_of, value_rows
from cutaway.inspection.figure import Figure, Part, Rows
from cutaway.inspection.points import branch_of
from cutaway.inspection.readout import (
    Spell,
    blocks,
    check_whole_sum,
    contributed,
    seen,
)
from cutaway.inspection.shown import Shown, for_json
from cutaway.models import Transformer
from cutaway.modules.attention import Attention
from cutaway.modules.bias import ScoreBias
from cutaway.modules.rotary import rotary_table
from cutaway.modules.score import Attending, scores
from cutaway.modules.stack import Stack


@dataclass(frozen=True, slots=True, repr=False)
class HeadView(Shown):
    """For each token, the tokens that a head would most look at, or whose scores it would most raise.

    Attributes:
        kind: ``"looks_for"`` (keys that the token's query scores highest) or ``"writes"``.
        branch: ``decoder.layers.3.attn``. head: which. kv_head: the key/value head that it reads.
        tokens: that were asked about.
        best: the best for each, and values, theirs. [token, k]
        worst: the lowest for each, and lows, theirs. [token, k]
        own: the token's own value. rank: how many tokens stand before it. [token]
        distance: of a query from its keys, in tokens; None of what is written.
        spell: how a token is written, if that is known.
        notes: what is held and what is left out.
    """

    kind: Literal["looks_for", "writes"]
    branch: str
    head: int
    kv_head: int
    tokens: tuple[int, ...]
    best: Tensor
    values: Tensor
    worst: Tensor
    lows: Tensor
    own: Tensor
    rank: Tensor
    distance: int | None
    notes: tuple[str, ...]
    spell: Spell | None = field(default=None, repr=False, compare=False)

    def word(self, token: int) -> str:
        """A token as it is written, or its id."""
        return str(token) if self.spell is None else self.spell(token)

    def pairs(self, n: int = 10) -> list[tuple[int, int, float]]:
        """The highest pairs: (token asked about, token found, value)."""
        flat, k = self.values.flatten(), self.values.shape[1]
        order = flat.topk(min(n, len(flat))).indices.tolist()
        return [(self.tokens[i // k], int(self.best.flatten()[i]), float(flat[i])) for i in order]

    def figure(self) -> Figure:
        """A row for each token."""
        rows: list[list[str | int | float]] = [
            [self.word(token), self._listed(best, values), self._listed(worst, lows), float(own), int(rank)]
            for token, best, values, worst, lows, own, rank in zip(
                self.tokens, self.best, self.values, self.worst, self.lows, self.own, self.rank, strict=True
            )
        ]
        does, other = ("looks for", "looks away from") if self.kind == "looks_for" else ("raises", "lowers")
        columns = ["token", does, other, "itself", "ahead of it"]
        at = "" if self.distance is None else f", {self.distance} tokens back"
        parts: list[Part] = [Rows(f"What the head {does}{at}", columns, rows)]
        return Figure(f"{self.branch}[{self.head}]", parts, self.notes)

    def _listed(self, tokens: Tensor, values: Tensor) -> str:
        return ", ".join(f"{seen(self.word(t))} {v:.2f}" for t, v in zip(tokens.tolist(), values.tolist(), strict=True))

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        head = {"kind": self.kind, "branch": self.branch, "head": self.head, "kv_head": self.kv_head}
        tensors = {name: getattr(self, name).tolist() for name in ("best", "values", "worst", "lows", "own", "rank")}
        words = {"words": [[self.word(t) for t in row] for row in self.best.tolist()]} if self.spell else {}
        return {**head, "distance": self.distance, "tokens": [*self.tokens], **tensors, **words, "notes": [*self.notes]}


@torch.no_grad()
def head_looks_for(
    model: Transformer,
    branch: str,
    head: int,
    tokens: Sequence[int],
    *,
    distance: int = 0,
    k: int = 10,
    spell: Spell | None = None,
) -> HeadView:
    """The QK view: which tokens a head's query of each given token scores highest, of the whole vocabulary.

    Args:
        model: whose head.
        branch: such as ``decoder.layers.3.attn``. head: which.
        tokens: whose queries.
        distance: how many tokens before the query the key stands: what rotary positions turn by and biases are for.
            No further than the model's longest text, and the head's window, reach.
        k: how many of the best and of the lowest. spell: a token's id → how it is written.

    Raises:
        NameNotFound, RequestError: no such head, one whose keys are of an encoder's output, or no such token.
    """
    at, body, stack = head_of(model, branch, head)
    table = tokens_of(model, branch)
    ids = check_ids(tokens, table.shape[0], "tokens")
    mask = body.spec.mask
    # As far as a text of this model's length and this head's own window or chunk allow.
    reach = min(n for n in (model.spec.max_positions, mask.window, mask.chunk) if n is not None) - 1
    least = 0 if mask.causal else -reach
    if isinstance(distance, bool) or not isinstance(distance, int) or not least <= distance <= reach:
        wanted = f"an int in {least}…{reach}"
        raise RequestError("a query cannot look there", field="distance", expected=wanted, got=distance)
    here, there = max(distance, 0), max(-distance, 0)
    q = _turned(body, body.queries(at.read(embedded(model, branch, ids)[None])), here, query=True)
    device = q.device
    queries = torch.full((1, len(ids)), here, device=device)
    found = []
    for block in blocks(table.shape[0], body.spec.n_heads * (len(ids) + body.spec.d_head)):
        x = at.read(embedded(model, branch, block)[None])
        keys = torch.full((1, x.shape[1]), there, device=device)
        turned = _turned(body, body.read(x)[0].transpose(1, 2), there, query=False).transpose(1, 2)
        plan = MaskPlan(MaskKind.FULL, body.spec.mask, queries, keys)
        bias = _bias(stack, body)
        a = Attending(body.spec, plan, 0.0, bias, body.near_keys, body.near_values)
        found.append(scores(q.transpose(1, 2), turned, a, queries, keys)[0, head].float().cpu())
    held_at = f"The key stands {distance} tokens before the query: positions and biases by distance are held there."
    notes = (ALONE, held_at, "Scores are the model's own, before the mask and the softmax over one text's keys.")
    return _view("looks_for", model, branch, head, ids, torch.cat(found, 1), k, distance, notes, spell)


@torch.no_grad()
def head_writes(
    model: Transformer, branch: str, head: int, tokens: Sequence[int], *, k: int = 10, spell: Spell | None = None
) -> HeadView:
    """The OV view: whose scores a head raises where it reads one of the given tokens.

    Args:
        model: whose stream is the sum of what is written to it.
        branch, head, tokens, k, spell: see :func:`head_looks_for`.

    Raises:
        NameNotFound, RequestError: no such head or token, a stream that is no sum, a head of the model with a curve.
    """
    check_whole_sum(model)
    at, body, _ = head_of(model, branch, head)
    ids = check_ids(tokens, tokens_of(model, branch).shape[0], "tokens")
    x = embedded(model, branch, ids)
    value, out = value_rows(at, body, head), output_columns(model, at, body, head)
    read = evened(at, x) @ value.t()
    clip = body.spec.clip
    written = (read if clip is None else read.clamp(-clip, clip)) @ out.t()
    pieces = [contributed(model, written[block]).cpu() for block in blocks(len(ids), model.spec.vocab_size)]
    norms = (
        "Norms are folded: their weights are there; the last one's scale is held at 1, so that values compare, but are "
    )
    notes = (ALONE, f"{norms}no scores. Biases, the same for every token, are left out.")
    return _view("writes", model, branch, head, ids, torch.cat(pieces), k, None, notes, spell)


def _turned(body: Attention, x: Tensor, position: int, *, query: bool) -> Tensor:
    """Queries or keys turned to a position. [1, token, head, d_head] → the same"""
    if body.spec.rotary is None:
        return x
    places = torch.full((1, x.shape[1]), position, device=x.device)
    return body.turned(x, rotary_table(body.spec.rotary, places, x.dtype), body.q_norm if query else body.k_norm)


def _bias(stack: Stack, body: Attention) -> Tensor | None:
    """The numbers of a bias by distance, if there is one."""
    wanted = (body.spec.bias, body.spec.n_heads)
    every = [bias for bias in stack.biases if isinstance(bias, ScoreBias) and (bias.spec, bias.n_heads) == wanted]
    return every[0].table(body.q.weight.device) if every else None


def _view(
    kind: Literal["looks_for", "writes"],
    model: Transformer,
    branch: str,
    head: int,
    ids: list[int],
    values: Tensor,
    k: int,
    distance: int | None,
    notes: tuple[str, ...],
    spell: Spell | None,
) -> HeadView:
    """The best and the lowest of each row. [token, vocab]"""
    k = min(whole("k", k, 1), values.shape[1])
    best, worst = values.topk(k, dim=1), values.topk(k, dim=1, largest=False)
    mine = torch.tensor(ids).clamp(max=values.shape[1] - 1)[:, None]
    own = values.gather(1, mine)
    rank = (values > own).sum(1)
    spec = branch_of(model, branch).spec.body
    group = spec.n_heads // spec.n_kv_heads  # type: ignore[union-attr]
    shared: dict[str, Any] = {"distance": distance, "notes": notes, "spell": spell}
    return HeadView(
        kind, branch, head, head // group, tuple(ids), best.indices, best.values, worst.indices, worst.values,
        own[:, 0], rank, **shared,
    )  # fmt: skip
