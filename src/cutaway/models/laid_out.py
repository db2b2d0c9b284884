"""A block's weights as the native library reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import is_

import torch
from torch import Tensor, nn

from cutaway.kernels import Stored
from cutaway.kernels import layout as c
from cutaway.modules.attention import Attention
from cutaway.modules.block import Block, Branch
from cutaway.modules.linear import Linear
from cutaway.modules.mlp import Mlp
from cutaway.modules.norm import Norm
from cutaway.spec import AttentionSpec, BlockSpec, MlpSpec

KINDS = {"layer": 1, "rms": 2}


def why_not(spec: BlockSpec) -> str:
    """What of this block the native library does not know, in words; empty if nothing."""
    if len(spec.branches) > 2:
        return "more than two branches"
    for place, branch in enumerate(spec.branches):
        match branch.body:
            case AttentionSpec() as body:
                if place or body.cross:
                    return "attention to a source"
                if body.bias is not None or body.relative is not None:
                    return "a bias or vectors by distance"
                if body.mask.chunk is not None or body.mask.prefix:
                    return "chunks or prefixes"
            case MlpSpec():
                pass
            case _:
                return "experts"
    return ""


@dataclass(slots=True)
class Weights:
    """Weights as they lay: a list for each thing about them, for they are looked through in every pass.

    Attributes:
        all, owners, names: each weight, whose parameter it was, and by which name.
        movable, addresses: those whose numbers may come to lie elsewhere, and where they were.
    """

    all: list[nn.Parameter] = field(default_factory=list)
    owners: list[dict[str, nn.Parameter | None]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    movable: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)

    def current(self) -> bool:
        """Whether all are where they were, and there are any."""
        held = all(map(is_, map(dict.get, self.owners, self.names), self.all))
        return held and bool(self.all) and [*map(Tensor.data_ptr, self.movable)] == self.addresses


def joined(parts: Iterable[Weights]) -> Weights:
    """All of several."""
    out = Weights()
    for part in parts:
        for one in fields(Weights):
            getattr(out, one.name).extend(getattr(part, one.name))
    return out


class LaidOut:
    """Pointers to a block's weights, made anew where a weight has moved.

    Args:
        block: whose weights; fp32 on a CPU, or :class:`Stored`.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self.attention = block.spec.attention
        self.struct = c.Block()
        self.weights = Weights()
        self.hooks = [hooks for m in block.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    @property
    def watched(self) -> bool:
        """Whether somebody hooked a function to the block or to a part of it."""
        return any(self.hooks)

    def refresh(self) -> None:
        """Lay the weights out, if they are not yet or no longer."""
        if self.weights.current():
            return
        self.weights = Weights()
        block, spec = self.block, self.block.spec
        d_model = next(m for m in block.modules() if isinstance(m, Linear)).weight.shape[1]
        out = self.struct
        out.d_model, out.n_branches = d_model, len(spec.branches)
        out.parallel, out.shared_norm = spec.parallel, spec.shared_norm
        for place, branch in enumerate(block.branches.values()):
            assert isinstance(branch, Branch)
            to = out.branches[place]
            to.pre, to.out, to.post = (self._norm(n) for n in (branch.pre_norm, branch.out_norm, branch.post_norm))
            to.scale = branch.spec.scale
            if isinstance(branch.body, Attention):
                to.kind, to.attention = 0, self._attention(branch.body)
            else:
                assert isinstance(branch.body, Mlp)
                to.kind, to.feedforward = 1, self._mlp(branch.body)

    def _attention(self, a: Attention) -> c.Attention:
        spec = a.spec
        reading = c.Reading(
            causal=spec.mask.causal, window=spec.mask.window or 0, scale=spec.score_scale, cap=spec.soft_cap or 0.0
        )
        return c.Attention(
            q=self._matrix(a.q),
            k=self._matrix(a.k),
            v=self._matrix(a.v),
            out=self._matrix(a.out),
            q_norm=self._norm(a.q_norm),
            k_norm=self._norm(a.k_norm),
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            d_head=spec.d_head,
            pairs=0 if spec.rotary is None else spec.rotary.d_rotary // 2,
            interleaved=spec.rotary is not None and spec.rotary.interleaved,
            norm_width=spec.qk_norm_over == "width",
            norm_after=spec.qk_norm_after,
            reading=reading,
            clip=spec.clip or 0.0,
        )

    def _mlp(self, mlp: Mlp) -> c.Feedforward:
        gate = c.Matrix() if mlp.gate is None else self._matrix(mlp.gate)
        curve = c.CURVES.index(mlp.spec.activation)
        return c.Feedforward(gate=gate, up=self._matrix(mlp.up), down=self._matrix(mlp.down), curve=curve)

    def _matrix(self, linear: Linear) -> c.Matrix:
        weight = linear.weight
        at, bias = self._address(linear, "weight"), self._address(linear, "bias")
        kind = weight.format if isinstance(weight, Stored) else 0
        return c.Matrix(data=at, bias=bias, rows=weight.shape[0], cols=weight.shape[1], format=kind)

    def _norm(self, norm: object) -> c.Norm:
        if not isinstance(norm, Norm):
            return c.Norm()
        spec = norm.spec
        at, bias = self._address(norm, "weight"), self._address(norm, "bias")
        return c.Norm(weight=at, bias=bias, eps=spec.eps, offset=spec.offset, kind=KINDS[spec.kind])

    def _address(self, module: nn.Module, name: str) -> int:
        weight = module._parameters.get(name)
        if weight is None:
            return 0
        self.weights.all.append(weight)
        self.weights.owners.append(module._parameters)
        self.weights.names.append(name)
        if isinstance(weight, Stored):
            return weight.raw.data_ptr()
        assert weight.is_contiguous()
        assert weight.dtype is torch.float32
        self.weights.movable.append(weight)
        self.weights.addresses.append(weight.data_ptr())
        return self.weights.addresses[-1]


def laid_out_norm(norm: object) -> c.Norm:
    """A norm by itself, as it is now; one that does nothing where there is none."""
    if not isinstance(norm, Norm):
        return c.Norm()
    spec, bias = norm.spec, None if norm.bias is None else norm.bias.data_ptr()
    return c.Norm(weight=norm.weight.data_ptr(), bias=bias, eps=spec.eps, offset=spec.offset, kind=KINDS[spec.kind])
