"""A block's weights as the native library reads them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from cutaway.kernels import Stored, multiply, size_of
from cutaway.kernels import layout as c
from cutaway.models.as_laid import Weights
from cutaway.modules.attention import Attention
from cutaway.modules.block import Block, Branch
from cutaway.modules.linear import Linear
from cutaway.modules.mlp import Mlp
from cutaway.modules.norm import Norm
from cutaway.modules.part import Identity, Named, is_plain
from cutaway.spec import AttentionSpec, BlockSpec, MlpSpec

KINDS = {"layer": 1, "rms": 2}
# What is called with every module there is.
EVERYWHERE = (modules._global_forward_hooks, modules._global_forward_pre_hooks)
# Modules whose calls the native library knows; a class made of one of them may do anything.
OWN = (Block, Branch, Attention, Mlp, Linear, Norm, Identity, Named)


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


class Unlike(Exception):
    """Something of a block is not as its spec has it: somebody else's module, another shape, another type."""


def fits(weight: object, shape: tuple[int, ...]) -> bool:
    """Whether the native library can read it where it lies, as that many numbers."""
    if not isinstance(weight, Tensor) or size_of(weight) != shape:
        return False
    if isinstance(weight, Stored):
        return True
    return weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Functions that are called with it."""
    return [hooks for m in module.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]


class LaidOut:
    """Pointers to a block's weights, made anew where a weight has moved or a module is another.

    Args:
        block: whose weights; fp32 on a CPU, or :class:`Stored`.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.spec = block, block.spec
        self.attention = block.spec.attention
        self.struct = c.Block()
        self.weights = Weights()

    def ready(self, width: int) -> bool:
        """Whether the native library can be called with it as it is now.

        Not where somebody hooked a function to a part of it, put something else in its place or a function in place
        of a method, nor where weights are not what its spec says: then the block itself is called.

        Args:
            width: of the stream.
        """
        if not self.weights.current():
            try:
                # Made anew and then put in place, for other threads and earlier passes have the old ones.
                self.struct, self.weights = self._lay_out(Weights())
            except Unlike:
                self.weights = Weights()
                return False
        return self.struct.d_model == width and not any(self.weights.hooks) and not any(EVERYWHERE)

    def _lay_out(self, found: Weights) -> tuple[c.Block, Weights]:
        block, spec = self.block, self.block.spec
        found.hooks = hooks_of(block)
        if spec != self.spec:  # who reads whom, and what turns, the cache and the stack have from the first one
            raise Unlike
        for module in block.modules():
            if type(module) not in OWN or not is_plain(module):
                raise Unlike
            if module._modules:
                found.parts.append(module._modules)
                found.were.append(dict(module._modules))
            found.add(module)
        first = next(m for m in block.modules() if isinstance(m, Linear)).weight
        if first is None or first.dim() != 2 or [*block.branches] != [branch.name for branch in spec.branches]:
            raise Unlike
        d = first.shape[1]
        out = c.Block()
        out.d_model, out.n_branches = d, len(spec.branches)
        out.parallel, out.shared_norm = spec.parallel, spec.shared_norm
        for place, branch in enumerate(block.branches.values()):
            if not isinstance(branch, Branch) or branch.spec != spec.branches[place]:
                raise Unlike
            to = out.branches[place]
            norms = (branch.pre_norm, branch.out_norm, branch.post_norm)
            to.pre, to.out, to.post = (_norm(n, d, found) for n in norms)
            to.scale = branch.spec.scale
            if isinstance(branch.body, Attention) and branch.body.spec == branch.spec.body:
                to.kind, to.attention = 0, _attention(branch.body, d, found)
            elif isinstance(branch.body, Mlp):
                to.kind, to.feedforward = 1, _mlp(branch.body, d, found)
            else:
                raise Unlike
        return out, found


def _attention(a: Attention, d: int, found: Weights) -> c.Attention:
    spec = a.spec
    if a.near_keys is not None or a.near_values is not None:
        raise Unlike
    reading = c.Reading(
        causal=spec.mask.causal, window=spec.mask.window or 0, scale=spec.score_scale, cap=spec.soft_cap or 0.0
    )
    across, narrow, whole = spec.n_heads * spec.d_head, spec.n_kv_heads * spec.d_head, spec.qk_norm_over == "width"
    return c.Attention(
        q=_matrix(a.q, across, d, found),
        k=_matrix(a.k, narrow, d, found),
        v=_matrix(a.v, narrow, d, found),
        out=_matrix(a.out, d, across, found),
        q_norm=_norm(a.q_norm, across if whole else spec.d_head, found),
        k_norm=_norm(a.k_norm, narrow if whole else spec.d_head, found),
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        d_head=spec.d_head,
        pairs=0 if spec.rotary is None else spec.rotary.d_rotary // 2,
        interleaved=spec.rotary is not None and spec.rotary.interleaved,
        norm_width=whole,
        norm_after=spec.qk_norm_after,
        reading=reading,
        clip=spec.clip or 0.0,
    )


def _mlp(mlp: Mlp, d: int, found: Weights) -> c.Feedforward:
    inner = len(mlp.up.weight)  # fewer than the spec says where somebody pruned them
    gate = c.Matrix() if mlp.gate is None else _matrix(mlp.gate, inner, d, found)
    up, down = _matrix(mlp.up, inner, d, found), _matrix(mlp.down, d, inner, found)
    return c.Feedforward(gate=gate, up=up, down=down, curve=c.CURVES.index(mlp.spec.activation))


def _matrix(linear: Linear, rows: int, cols: int, found: Weights) -> c.Matrix:
    if not isinstance(linear, Linear) or linear.product not in (F.linear, multiply):
        raise Unlike
    at, bias = _address(linear, "weight", (rows, cols), found), _bias(linear, rows, found)
    weight = linear.weight
    kind = weight.format if isinstance(weight, Stored) else 0
    return c.Matrix(data=at, bias=bias, rows=rows, cols=cols, format=kind)


def _norm(norm: nn.Module, width: int, found: Weights) -> c.Norm:
    if isinstance(norm, Identity):
        return c.Norm()
    if not isinstance(norm, Norm):
        raise Unlike
    at, bias = _address(norm, "weight", (width,), found), _bias(norm, width, found)
    return c.Norm(weight=at, bias=bias, eps=norm.spec.eps, offset=norm.spec.offset, kind=KINDS[norm.spec.kind])


def _bias(module: nn.Module, width: int, found: Weights) -> int:
    """Where it lies; 0 where there is none, and one that comes there later is a change."""
    if getattr(module, "bias", Unlike) is not None:
        return _address(module, "bias", (width,), found)
    found.all.append(None)
    found.owners.append(module._parameters)
    found.names.append("bias")
    return 0


def _address(module: nn.Module, name: str, shape: tuple[int, ...], found: Weights) -> int:
    weight = module._parameters.get(name)
    # A tensor that is no parameter may be set in place of one.
    if weight is None or getattr(module, name) is not weight or not fits(weight, shape):
        raise Unlike
    found.all.append(weight)
    found.owners.append(module._parameters)
    found.names.append(name)
    if isinstance(weight, Stored):
        return weight.raw.data_ptr()
    found.movable.append(weight)
    found.addresses.append(weight.data_ptr())
    found.counts.append(weight.numel())
    return found.addresses[-1]


def laid_out_norm(norm: nn.Module, width: int, found: Weights | None = None) -> c.Norm | None:
    """A norm by itself, as it is now, one that does nothing where there is none; None where it is to be called.

    Its weights are added to those that were ``found``.
    """
    if type(norm) not in OWN or not is_plain(norm) or any(hooks_of(norm)) or any(EVERYWHERE):
        return None
    found = Weights() if found is None else found
    found.add(norm)
    found.hooks += hooks_of(norm)
    try:
        return _norm(norm, width, found)
    except Unlike:
        return None
