"""Attention: the one place where positions exchange information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from cutaway.cache import CrossView, LayerView, MaskPlan
from cutaway.modules.attend import attend, blockwise, explicit
from cutaway.modules.linear import Linear
from cutaway.modules.norm import norm_or_identity
from cutaway.modules.part import Part
from cutaway.modules.rotary import rotate
from cutaway.modules.score import Attending
from cutaway.modules.steady import steady
from cutaway.modules.tap import Tap
from cutaway.shapes import Angles, Heads, KeyByHead, KvHeads, Stream
from cutaway.spec import AttentionSpec

How: TypeAlias = Literal["fused", "explicit", "blockwise", "steady"]


@dataclass(slots=True)
class LayerInputs:
    """What a layer is given beside the stream: tensors and a plan, no layer number.

    Attributes:
        view: where keys and values go and come from, and who may read whom.
        rotary: cos and sin for this pass's tokens, if the layer turns.
        bias: the numbers of the layer's bias on scores, if it has one.
        how: which implementation of attention.
        cross: keys and values of the source, for a layer that reads one.
    """

    view: LayerView
    rotary: tuple[Angles, Angles] | None = None
    bias: Tensor | None = None
    how: How = "fused"
    cross: CrossView | None = None


class Attention(Part):
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
        if self.spec.cross:
            return self._of_source(x, inputs, tap)
        spec = self.spec
        q, (k, v) = self.queries(x), self._keys(x)
        if tap is not None:
            q, k, v = tap("q", q), tap("k", k), tap("v", v)
        if inputs.rotary is not None and spec.rotary is not None:
            q, k = self.turned(q, inputs.rotary, self.q_norm), self.turned(k, inputs.rotary, self.k_norm)
            if tap is not None:
                q, k = tap("q_rot", q), tap("k_rot", k)

        keys, values = inputs.view.update(k.transpose(1, 2), v.transpose(1, 2))
        return self._mix(q, keys, values, inputs.view.plan, inputs, tap)

    def _of_source(self, x: Stream, inputs: LayerInputs, tap: Tap | None) -> Stream:
        """The same with the keys and values that :meth:`read` made of an encoder's output. Taps q, scores … ."""
        assert inputs.cross is not None, "cross-attention needs a source"
        q = self.queries(x)
        if tap is not None:
            q = tap("q", q)
        return self._mix(q, inputs.cross.k, inputs.cross.v, inputs.cross.plan, inputs, tap)

    def read(self, memory: Stream, tap: Tap | None = None) -> tuple[KeyByHead, KeyByHead]:
        """Keys and values of an encoder's output, by head. Taps k v. [batch, kv_head, key, d_head]"""
        k, v = self._keys(memory)
        if tap is not None:
            k, v = tap("k", k), tap("v", v)
        # Laid out as they are read for the whole of the decoding, and as rows picked from them are.
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def _mix(
        self, q: Heads, keys: KeyByHead, values: KeyByHead, plan: MaskPlan, inputs: LayerInputs, tap: Tap | None
    ) -> Stream:
        """From queries by token and keys by head to what the branch adds."""
        spec = self.spec
        dropout = spec.dropout if self.training else 0.0
        a = Attending(spec, plan, dropout, inputs.bias, self.near_keys, self.near_values)
        q = q.transpose(1, 2)
        if inputs.how == "explicit" or (tap is not None and (tap.wants("scores") or tap.wants("weights"))):
            z = explicit(q, keys, values, a, tap)
        else:
            ways = {"fused": attend, "blockwise": blockwise, "steady": steady}
            z = ways[inputs.how](q, keys, values, a)
        z = z.transpose(1, 2)
        if tap is None:
            return self.out(z.flatten(-2))
        z = tap("z", z)
        return self._out_by_head(z, tap) if tap.wants("head_out") else self.out(z.flatten(-2))

    def queries(self, x: Stream) -> Heads:
        """By head, clipped and normed, as rotation reads them. [batch, query, head, d_head]"""
        q = self._by_head(self.q(x))
        return q if self.spec.qk_norm_after else self._norm(q, self.q_norm)

    def turned(self, x: Tensor, rotary: tuple[Angles, Angles], norm: nn.Module) -> Tensor:
        """Queries or keys turned, and normed where that comes after. [batch, query, head, d_head] → the same"""
        assert self.spec.rotary is not None
        x = rotate(x, *rotary, self.spec.rotary.interleaved)
        return self._norm(x, norm) if self.spec.qk_norm_after else x

    def _keys(self, x: Stream) -> tuple[KvHeads, KvHeads]:
        """Keys, normed, and values. [batch, key, kv_head, d_head]"""
        k, v = self._by_head(self.k(x)), self._by_head(self.v(x))
        return (k if self.spec.qk_norm_after else self._norm(k, self.k_norm)), v

    def _by_head(self, x: Tensor) -> Tensor:
        if self.spec.clip is not None:
            x = x.clamp(-self.spec.clip, self.spec.clip)
        return x.unflatten(-1, (-1, self.spec.d_head))

    def _norm(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Over each head, or over all of them as one vector."""
        return norm(x) if self.spec.qk_norm_over == "head" else norm(x.flatten(-2)).view_as(x)

    def _out_by_head(self, z: Tensor, tap: Tap) -> Stream:
        """The output projection with each head's share apart. [batch, query, head, d_model]"""
        weight = self.out.weight.unflatten(1, (self.spec.n_heads, self.spec.d_head))
        shares = tap("head_out", torch.einsum("bqhd,mhd->bqhm", z, weight))
        out = shares.sum(2)
        return out if self.out.bias is None else out + self.out.bias
