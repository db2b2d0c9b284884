"""A block's weights as the native library reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from operator import contains, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from cutaway.kernels import Stored
from cutaway.kernels import layout as c
from cutaway.modules.attention import Attention
from cutaway.modules.block import Block, Branch
from cutaway.modules.linear import Linear
from cutaway.modules.mlp import Mlp
from cutaway.modules.norm import Norm
from cutaway.modules.part import Identity, Named, changes
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


@dataclass(slots=True)
class Weights:
    """Weights as they lay: a list for each thing about them, for they are looked through in every pass.

    Attributes:
        all, owners, names: each weight, whose parameter it was, and by which name.
        movable, addresses: those whose numbers may come to lie elsewhere, and where they were.
        parts, were: what each module is made of, and was made of.
        own: what is set on each module that is called, where a ``forward`` may be put in place of its class's.
        hooks: what is called with them, empty while nobody looks.
        noted: how many changes there were when all this was last looked through.
    """

    all: list[nn.Parameter] = field(default_factory=list)
    owners: list[dict[str, nn.Parameter | None]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    movable: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    parts: list[dict[str, nn.Module | None]] = field(default_factory=list)
    were: list[dict[str, nn.Module | None]] = field(default_factory=list)
    own: list[dict[str, object]] = field(default_factory=list)
    hooks: list[dict[int, Any]] = field(default_factory=list)
    noted: int = -1

    def current(self) -> bool:
        """Whether all are where they were, in the same modules, and there are any."""
        held = all(map(is_, map(dict.get, self.owners, self.names), self.all))
        same = held and self.parts == self.were and not any(map(contains, self.own, repeat("forward")))
        return same and bool(self.all) and self._in_place()

    def untouched(self) -> bool:
        """Whether :meth:`current` was so with no hooks, and nothing was noted since: what a single token can afford."""
        if self.noted == changes():
            return self._in_place()
        now = changes()
        if not self.current() or any(self.hooks):
            return False
        self.noted = now
        return True

    def _in_place(self) -> bool:
        return [*map(Tensor.data_ptr, self.movable)] == self.addresses


def joined(parts: Iterable[Weights]) -> Weights:
    """All of several."""
    out = Weights()
    for part in parts:
        for name in ("all", "owners", "names", "movable", "addresses", "parts", "were", "own", "hooks"):
            getattr(out, name).extend(getattr(part, name))
    return out


def fits(weight: object, shape: tuple[int, ...]) -> bool:
    """Whether the native library can read it where it lies, as that many numbers."""
    if not isinstance(weight, Tensor) or tuple(weight.shape) != shape:
        return False
    lies = weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    return isinstance(weight, Stored) or lies


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Functions that are called with it."""
    return [hooks for m in module.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]


class LaidOut:
    """Pointers to a block's weights, made anew where a weight has moved or a module is another.

    Args:
        block: whose weights; fp32 on a CPU, or :class:`Stored`.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self.attention = block.spec.attention
        self.struct = c.Block()
        self.weights = Weights()

    def ready(self, width: int) -> bool:
        """Whether the native library can be called with it as it is now.

        Not where somebody hooked a function to a part of it or put something else in its place, nor where weights
        are not what its spec says: then the block itself is called.

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
        for module in block.modules():
            if type(module) not in OWN or "forward" in module.__dict__:
                raise Unlike
            if module._modules:
                found.parts.append(module._modules)
                found.were.append(dict(module._modules))
            if not isinstance(module, Named):
                found.own.append(module.__dict__)
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
            if isinstance(branch.body, Attention):
                to.kind, to.attention = 0, _attention(branch.body, d, found)
            elif isinstance(branch.body, Mlp):
                to.kind, to.feedforward = 1, _mlp(branch.body, d, found)
            else:
                raise Unlike
        return out, found


def _attention(a: Attention, d: int, found: Weights) -> c.Attention:
    spec = a.spec
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
    at = _address(linear, "weight", (rows, cols), found)
    bias = 0 if linear._parameters.get("bias") is None else _address(linear, "bias", (rows,), found)
    weight = linear.weight
    kind = weight.format if isinstance(weight, Stored) else 0
    return c.Matrix(data=at, bias=bias, rows=rows, cols=cols, format=kind)


def _norm(norm: nn.Module, width: int, found: Weights) -> c.Norm:
    if isinstance(norm, Identity):
        return c.Norm()
    if not isinstance(norm, Norm):
        raise Unlike
    at = _address(norm, "weight", (width,), found)
    bias = 0 if norm._parameters.get("bias") is None else _address(norm, "bias", (width,), found)
    return c.Norm(weight=at, bias=bias, eps=norm.spec.eps, offset=norm.spec.offset, kind=KINDS[norm.spec.kind])


def _address(module: nn.Module, name: str, shape: tuple[int, ...], found: Weights) -> int:
    weight = module._parameters.get(name)
    if weight is None or not fits(weight, shape):
        raise Unlike
    found.all.append(weight)
    found.owners.append(module._parameters)
    found.names.append(name)
    if isinstance(weight, Stored):
        return weight.raw.data_ptr()
    found.movable.append(weight)
    found.addresses.append(weight.data_ptr())
    return found.addresses[-1]


def laid_out_norm(norm: nn.Module, width: int, found: Weights | None = None) -> c.Norm | None:
    """A norm by itself, as it is now, one that does nothing where there is none; None where it is to be called.

    Its weights are added to those that were ``found``.
    """
    if type(norm) not in OWN or "forward" in norm.__dict__ or any(hooks_of(norm)) or any(EVERYWHERE):
        return None
    found = Weights() if found is None else found
    found.own.append(norm.__dict__)
    found.hooks += hooks_of(norm)
    try:
        return _norm(norm, width, found)
    except Unlike:
        return None
