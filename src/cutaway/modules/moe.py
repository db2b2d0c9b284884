"""Mixture of experts: a router sends each token to a few of many feed-forward networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cutaway.kernels import Grouped, grouped
from cutaway.modules.activation import ACTIVATIONS
from cutaway.modules.linear import Linear
from cutaway.modules.part import Part
from cutaway.modules.tap import Tap
from cutaway.shapes import Stream
from cutaway.spec import MoeSpec


class Moe(Part):
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
        self.product: Grouped = grouped  # or another implementation of it: see Transformer.use_kernels

    def forward(self, x: Stream, tap: Tap | None = None) -> Stream:
        """Taps ``router_logits`` and ``router_weights`` (0 where not chosen), [batch, query, expert], and ``experts``,
        what each adds (0 where not chosen), [batch, query, expert, d_model].

        Edited weights choose anew: whatever is not 0 is computed.
        """
        if self.spec.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - self.spec.jitter, 1 + self.spec.jitter)
        logits = self.router(x)
        if tap is not None:
            logits = tap("router_logits", logits)
        shares, chosen = route(logits, self.spec)
        if tap is not None and tap.wants("router_weights"):
            weights = torch.zeros_like(logits, dtype=shares.dtype).scatter(-1, chosen, shares)
            weights = tap("router_weights", weights)
            most = max(1, int((weights != 0).sum(-1).max())) if weights.numel() else 1
            chosen = weights.abs().topk(most, dim=-1).indices
            shares = weights.gather(-1, chosen)
        added = self._made(x, chosen) * shares[..., None]  # [batch, query, top_k, d_model]
        if tap is not None and tap.wants("experts"):
            apart = added.new_zeros(*x.shape[:2], self.spec.n_experts, x.shape[2])
            added = tap("experts", apart.scatter(2, chosen[..., None].expand_as(added), added))
        return added.sum(2).to(x.dtype)

    def _made(self, x: Stream, chosen: Tensor) -> Tensor:
        """What each chosen expert makes of its token. [batch, query, top_k, d_model]

        Tokens are put in the order of their experts, so that each expert has one product of matrices.
        """
        flat, top_k = chosen.flatten(), chosen.shape[-1]
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.spec.n_experts).tolist()
        read = x.flatten(0, 1)[order // top_k]
        act, up = ACTIVATIONS[self.spec.expert.activation], self.product(read, self.up, counts)
        opened = act(up) if self.gate is None else act(self.product(read, self.gate, counts)) * up
        return self.product(opened, self.down, counts)[order.argsort()].unflatten(0, chosen.shape)


def route(logits: Tensor, spec: MoeSpec) -> tuple[Tensor, Tensor]:
    """Shares, in fp32, and numbers of the chosen experts: the largest of a softmax over all. [..., top_k] each"""
    shares, chosen = logits.float().softmax(-1).topk(spec.top_k, dim=-1)
    return (shares / shares.sum(-1, keepdim=True) if spec.normalised else shares), chosen


def balance_loss(logits: Tensor, top_k: int) -> Tensor:
    """How unevenly tokens are spread over experts: 1 for each choice when even (Fedus et al. 2021, eq. 4).

    Args:
        logits: the router's, before any softmax, of one layer or of several together; without those of pads.
            [..., expert]
        top_k: experts a token goes to.
    """
    n = logits.shape[-1]
    shares = logits.float().reshape(-1, n).softmax(-1)
    chosen = torch.zeros_like(shares).scatter(1, shares.topk(top_k, dim=-1).indices, 1.0)
    return n * (chosen.mean(0) * shares.mean(0)).sum()
