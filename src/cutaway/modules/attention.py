"""Attention: the one place where positions exchange information."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cutaway.cache import LayerView
from cutaway.modules.attend import attend, explicit
from cutaway.modules.linear import Linear
from cutaway.modules.norm import norm_or_identity
from cutaway.modules.rotary import rotate
from cutaway.modules.tap import Tap
from cutaway.shapes import Angles, Stream
from cutaway.spec import AttentionSpec


@dataclass(slots=True)
class LayerInputs:
    """What a layer is given beside the stream: tensors and a plan, no layer number.

    Attributes:
        view: where keys and values go and come from, and who may read whom.
        rotary: cos and sin for this pass's tokens, if the layer turns.
        explicit: use the readable attention instead of the fused one.
    """

    view: LayerView
    rotary: tuple[Angles, Angles] | None = None
    explicit: bool = False


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017), with grouped key/value heads (Ainslie et al. 2023).

    Args:
        spec: heads, rotation, norms and biases.
        d_model: width of the residual stream.
    """

    def __init__(self, spec: AttentionSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.q = Linear(d_model, spec.n_heads * spec.d_head, spec.qkv_bias)
        self.k = Linear(d_model, spec.n_kv_heads * spec.d_head, spec.qkv_bias)
        self.v = Linear(d_model, spec.n_kv_heads * spec.d_head, spec.qkv_bias)
        self.q_norm = norm_or_identity(spec.qk_norm, spec.d_head)
        self.k_norm = norm_or_identity(spec.qk_norm, spec.d_head)
        self.out = Linear(spec.n_heads * spec.d_head, d_model, spec.out_bias)

    def forward(self, x: Stream, inputs: LayerInputs, tap: Tap | None = None) -> Stream:
        """Taps, in order: q k v, q_rot k_rot, scores weights, z, head_out.

        q and k are tapped after their norm, as rotation reads them. [batch, query, head, d_head]
        """
        spec = self.spec
        q = self.q_norm(self.q(x).unflatten(-1, (spec.n_heads, spec.d_head)))
        k = self.k_norm(self.k(x).unflatten(-1, (spec.n_kv_heads, spec.d_head)))
        v = self.v(x).unflatten(-1, (spec.n_kv_heads, spec.d_head))
        if tap is not None:
            q, k, v = tap("q", q), tap("k", k), tap("v", v)
        if inputs.rotary is not None:
            q, k = rotate(q, *inputs.rotary), rotate(k, *inputs.rotary)
            if tap is not None:
                q, k = tap("q_rot", q), tap("k_rot", k)

        keys, values = inputs.view.update(k.transpose(1, 2), v.transpose(1, 2))
        dropout = spec.dropout if self.training else 0.0
        plan = inputs.view.plan
        if inputs.explicit or (tap is not None and (tap.wants("scores") or tap.wants("weights"))):
            z = explicit(q.transpose(1, 2), keys, values, spec, plan, dropout, tap=tap)
        else:
            z = attend(q.transpose(1, 2), keys, values, spec, plan, dropout)
        z = z.transpose(1, 2)
        if tap is None:
            return self.out(z.flatten(-2))
        z = tap("z", z)
        return self._out_by_head(z, tap) if tap.wants("head_out") else self.out(z.flatten(-2))

    def _out_by_head(self, z: Tensor, tap: Tap) -> Stream:
        """The output projection with each head's share apart. [batch, query, head, d_model]"""
        weight = self.out.weight.unflatten(1, (self.spec.n_heads, self.spec.d_head))
        shares = tap("head_out", torch.einsum("bqhd,mhd->bqhm", z, weight))
        out = shares.sum(2)
        return out if self.out.bias is None else out + self.out.bias
