"""Mixture of experts: a router sends each token to a few of many feed-forward networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cutaway.modules.activation import ACTIVATIONS
from cutaway.modules.linear import Linear
from cutaway.modules.tap import Tap
from cutaway.shapes import Stream
from cutaway.spec import MoeSpec


class Moe(nn.Module):
    """Σ over a token's chosen experts of its share times what the expert makes of it (Shazeer et al. 2017).

    Args:
        spec: how many experts, how many are chosen, what one is (gated or not, without biases).
        d_model: width of the residual stream.
    """

    def __init__(self, spec: MoeSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        n, d_ff = spec.n_experts, spec.expert.d_ff
        self.router = Linear(d_model, n)
        self.gate = nn.Parameter(torch.empty(n, d_ff, d_model)) if spec.expert.gated else None
        self.up = nn.Parameter(torch.empty(n, d_ff, d_model))
        self.down = nn.Parameter(torch.empty(n, d_model, d_ff))

    def forward(self, x: Stream, tap: Tap | None = None) -> Stream:
        """Taps ``router_logits`` and ``router_weights`` (0 where not chosen), [batch, query, expert], and ``experts``,
        what each adds, [batch, query, expert, d_model]."""
        logits = self.router(x)
        if tap is not None:
            logits = tap("router_logits", logits)
        shares, chosen = route(logits, self.spec)
        weights = torch.zeros_like(logits).scatter(-1, chosen, shares.to(logits.dtype))
        if tap is not None:
            weights = tap("router_weights", weights)
            if tap.wants("experts"):
                return self._apart(x, weights, tap)
        flat, flat_weights = x.flatten(0, 1), weights.flatten(0, 1)
        out = torch.zeros_like(flat)
        for expert in range(self.spec.n_experts):
            tokens = flat_weights[:, expert].nonzero()[:, 0]
            if tokens.numel():
                share = flat_weights[tokens, expert, None]
                out = out.index_add(0, tokens, self._expert(flat[tokens], expert) * share)
        return out.unflatten(0, x.shape[:2])

    def _expert(self, x: Tensor, i: int) -> Tensor:
        act = ACTIVATIONS[self.spec.expert.activation]
        up = x @ self.up[i].t()
        hidden = act(up) if self.gate is None else act(x @ self.gate[i].t()) * up
        return hidden @ self.down[i].t()

    def _apart(self, x: Stream, weights: Tensor, tap: Tap) -> Stream:
        """Every expert's share on its own."""
        each = [self._expert(x, i) * weights[..., i : i + 1] for i in range(self.spec.n_experts)]
        return tap("experts", torch.stack(each, dim=2)).sum(2)


def route(logits: Tensor, spec: MoeSpec) -> tuple[Tensor, Tensor]:
    """Shares and numbers of the chosen experts: the largest of a softmax over all. [..., top_k] each"""
    shares, chosen = logits.float().softmax(-1).topk(spec.top_k, dim=-1)
    return (shares / shares.sum(-1, keepdim=True) if spec.normalised else shares), chosen


def balance_loss(logits: Tensor, top_k: int) -> Tensor:
    """How unevenly tokens are spread over experts: 1 for each choice when even (Fedus et al. 2021, eq. 4).

    Args:
        logits: the router's, before any softmax. [..., expert]
        top_k: experts a token goes to.
    """
    n = logits.shape[-1]
    shares = logits.float().reshape(-1, n).softmax(-1)
    chosen = torch.zeros_like(shares).scatter(1, shares.topk(top_k, dim=-1).indices, 1.0)
    return n * (chosen.mean(0) * shares.mean(0)).sum()
