"""Attention: the one place where positions exchange information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from cutaway.cache import LayerView
from cutaway.modules.attend import attend, blockwise, explicit
from cutaway.modules.linear import Linear
from cutaway.modules.norm import norm_or_identity
from cutaway.modules.rotary import rotate
from cutaway.modules.score import Attending
from cutaway.modules.tap import Tap
from cutaway.shapes import Angles, Heads, Stream
from cutaway.spec import AttentionSpec

How: TypeAlias = Literal["fused", "explicit", "blockwise"]


@dataclass(slots=True)
class LayerInputs:
    """What a layer is given beside the stream: tensors and a plan, no layer number.

    Attributes:
        view: where keys and values go and come from, and who may read whom.
        rotary: cos and sin for this pass's tokens, if the layer turns.
        bias: the numbers of the layer's bias on scores, if it has one.
        how: which implementation of attention.
    """

    view: LayerView
    rotary: tuple[Angles, Angles] | None = None
    bias: Tensor | None = None
    how: How = "fused"


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017), with grouped key/value heads (Ainslie et al. 2023).

    Args:
        spec: heads, positions, norms and biases.
        d_model: width of the residual stream.
    """

    def __init__(self, spec: AttentionSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.q = Linear(d_model, spec.n_heads * spec.d_head, spec.qkv_bias)
        self.k = Linear(d_model, spec.n_kv_heads * spec.d_head, spec.qkv_bias)
        self.v = Linear(d_model, spec.n_kv_heads * spec.d_head, spec.qkv_bias)
        whole = spec.qk_norm_over == "width"
        self.q_norm = norm_or_identity(spec.qk_norm, spec.d_head * (spec.n_heads if whole else 1))
        self.k_norm = norm_or_identity(spec.qk_norm, spec.d_head * (spec.n_kv_heads if whole else 1))
        self.out = Linear(spec.n_heads * spec.d_head, d_model, spec.out_bias)
        near = spec.relative
        rows = 0 if near is None else 2 * near.max_distance + 1
        self.near_keys = nn.Parameter(torch.empty(rows, spec.d_head)) if near else None
        self.near_values = nn.Parameter(torch.empty(rows, spec.d_head)) if near and near.values else None

    def forward(self, x: Stream, inputs: LayerInputs, tap: Tap | None = None) -> Stream:
        """Taps, in order: q k v, q_rot k_rot, scores weights, z, head_out.

        q and k are tapped as rotation reads them, after a norm that comes before it. [batch, query, head, d_head]
        """
        spec = self.spec
        q, k, v = self._project(x)
        if tap is not None:
            q, k, v = tap("q", q), tap("k", k), tap("v", v)
        if inputs.rotary is not None and spec.rotary is not None:
            q, k = (rotate(t, *inputs.rotary, spec.rotary.interleaved) for t in (q, k))
            if spec.qk_norm_after:
                q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
            if tap is not None:
                q, k = tap("q_rot", q), tap("k_rot", k)

        keys, values = inputs.view.update(k.transpose(1, 2), v.transpose(1, 2))
        dropout = spec.dropout if self.training else 0.0
        a = Attending(spec, inputs.view.plan, dropout, inputs.bias, self.near_keys, self.near_values)
        q = q.transpose(1, 2)
        if inputs.how == "explicit" or (tap is not None and (tap.wants("scores") or tap.wants("weights"))):
            z = explicit(q, keys, values, a, tap)
        else:
            z = (blockwise if inputs.how == "blockwise" else attend)(q, keys, values, a)
        z = z.transpose(1, 2)
        if tap is None:
            return self.out(z.flatten(-2))
        z = tap("z", z)
        return self._out_by_head(z, tap) if tap.wants("head_out") else self.out(z.flatten(-2))

    def _project(self, x: Stream) -> tuple[Heads, Tensor, Tensor]:
        """Queries, keys and values by head, clipped and normed. [batch, query, head or kv_head, d_head]"""
        spec = self.spec
        q, k, v = self.q(x), self.k(x), self.v(x)
        if spec.clip is not None:
            q, k, v = (t.clamp(-spec.clip, spec.clip) for t in (q, k, v))
        q, k, v = (t.unflatten(-1, (-1, spec.d_head)) for t in (q, k, v))
        if not spec.qk_norm_after:
            q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        return q, k, v

    def _norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Over each head, or over all of them as one vector."""
        return norm(x) if self.spec.qk_norm_over == "head" else norm(x.flatten(-2)).view_as(x)

    def _out_by_head(self, z: Tensor, tap: Tap) -> Stream:
        """The output projection with each head's share apart. [batch, query, head, d_model]"""
        weight = self.out.weight.unflatten(1, (self.spec.n_heads, self.spec.d_head))
        shares = tap("head_out", torch.einsum("bqhd,mhd->bqhm", z, weight))
        out = shares.sum(2)
        return out if self.out.bias is None else out + self.out.bias
