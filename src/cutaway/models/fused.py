"""Blocks run whole by the native library: an implementation of the readable block, never another definition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.cache import MaskPlan
from cutaway.cache.passing import PassingView
from cutaway.cache.slots import SlotView
from cutaway.kernels import NativeLibrary, Stored
from cutaway.kernels import layout as c
from cutaway.modules.attention import Attention, LayerInputs
from cutaway.modules.block import Block, Branch
from cutaway.modules.linear import Linear
from cutaway.modules.mlp import Mlp
from cutaway.modules.norm import Norm
from cutaway.modules.stack import Runner
from cutaway.modules.tap import Tap
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


class PassTensors:
    """What all layers of one pass share: which tokens there are, and where.

    Args:
        plan: of the pass; pads (−1) are left out.
    """

    def __init__(self, plan: MaskPlan) -> None:
        self.plan = plan
        batch, n = plan.queries.shape
        flat = plan.queries.reshape(-1)
        there = flat >= 0
        self.whole = bool(there.all())
        self.places = torch.arange(batch * n) if self.whole else there.nonzero()[:, 0]
        self.rows = self.places // n
        self.positions = flat[self.places].contiguous()
        self.keys = plan.keys.expand(batch, -1).contiguous()
        self.count = self.places.numel()

    def slots(self, slots: Tensor) -> Tensor:
        """A slot for each token, of one for each query or one for each row and query."""
        batch, n = self.plan.queries.shape
        return slots.expand(batch, n).reshape(-1)[self.places].contiguous()


class Shared:
    """The last pass's tensors, for the next layer that is given the same plan."""

    def __init__(self) -> None:
        self._known: dict[int, PassTensors] = {}
        self._slots: tuple[Tensor, MaskPlan, Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Shared, ()

    def of(self, plan: MaskPlan) -> PassTensors:
        """Made once for each plan of a pass."""
        found = self._known.get(id(plan))
        if found is None or found.plan is not plan:
            if len(self._known) >= 8:
                self._known.clear()
            found = self._known[id(plan)] = PassTensors(plan)
        return found

    def slots(self, slots: Tensor, tensors: PassTensors) -> Tensor:
        """Made once for as long as the slots are the same."""
        if self._slots is None or self._slots[0] is not slots or self._slots[1] is not tensors.plan:
            self._slots = (slots, tensors.plan, tensors.slots(slots))
        return self._slots[2]


class FusedBlock:
    """Calls a block through the native library.

    As it is where somebody watches, where gradients are wanted, in training, and where attention is not to be the
    fused one.

    Args:
        block: whose weights.
        native: the library.
        shared: what is kept between layers of a pass.
    """

    def __init__(self, block: Block, native: NativeLibrary, shared: Shared) -> None:
        self._block = block
        self._attention = block.spec.attention
        self._native = native
        self._shared = shared
        self._layout: c.Block | None = None
        self._held: list[tuple[dict[str, nn.Parameter | None], str, int]] = []  # whose weight lies where
        modules = [*block.modules()]
        self._hooks = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedBlock, (self._block, self._native, self._shared)

    def __call__(self, x: Tensor, inputs: LayerInputs, tap: Tap | None = None) -> Tensor:
        """As :meth:`Block.forward`."""
        plain = tap is not None or inputs.how not in ("fused", "steady") or torch.is_grad_enabled()
        plain = plain or x.dtype is not torch.float32 or inputs.view.plan.query_segments is not None
        if plain or self._block.training or any(self._hooks):
            return self._block(x, inputs, tap)
        if not x.numel():
            return x
        spec = self._attention
        tensors = self._shared.of(inputs.view.plan)
        if self._layout is None or any(_address(where.get(name)) != at for where, name, at in self._held):
            self._held = []
            self._layout = self._lay_out()
        x = x.contiguous()
        y = torch.empty_like(x) if tensors.whole else x.clone()
        given = c.Pass(
            x=x.data_ptr(),
            y=y.data_ptr(),
            n=tensors.count,
            places=tensors.places.data_ptr(),
            rows=tensors.rows.data_ptr(),
            positions=tensors.positions.data_ptr(),
            batch=x.shape[0],
        )
        if inputs.rotary is not None and spec.rotary is not None:
            cos, sin = (table.expand(x.shape[0], -1, -1).contiguous() for table in inputs.rotary)
            given.cos, given.sin = cos.data_ptr(), sin.data_ptr()
        view = inputs.view
        if isinstance(view, SlotView) and not view.join and view.k.dtype is torch.float32:
            slots = self._shared.slots(view.slots, tensors)
            given.slots = slots.data_ptr()
            self._write(given, view.k, view.v)
            self._read(given, view.k, view.v, tensors)
            self._native.block(self._layout, given)
            return y
        # Keys and values are not simply written and read: the first half makes them, the view says what is read.
        batch, n = x.shape[:2]
        k = torch.zeros(batch, spec.n_kv_heads, n, spec.d_head)
        v = torch.zeros_like(k)
        q = torch.empty(tensors.count, spec.n_heads * spec.d_head)
        slots = tensors.places % n
        given.slots, given.q, given.half = slots.data_ptr(), q.data_ptr(), 1
        self._write(given, k, v)
        if not isinstance(view, PassingView):
            self._native.block(self._layout, given)
            keys, values = view.update(k, v)
            given.half = 2
        else:
            keys, values, given.half = k, v, 0
        if keys.stride(3) != 1 or values.stride(3) != 1:
            keys, values = keys.contiguous(), values.contiguous()
        self._read(given, keys, values, tensors)
        self._native.block(self._layout, given)
        return y

    @staticmethod
    def _write(given: c.Pass, k: Tensor, v: Tensor) -> None:
        given.k, given.v = k.data_ptr(), v.data_ptr()
        given.row, given.head, given.slot = k.stride(0), k.stride(1), k.stride(2)

    @staticmethod
    def _read(given: c.Pass, k: Tensor, v: Tensor, tensors: PassTensors) -> None:
        keys = given.keys
        keys.k, keys.v = k.data_ptr(), v.data_ptr()
        keys.k_row, keys.k_head, keys.k_slot = k.stride(0), k.stride(1), k.stride(2)
        keys.v_row, keys.v_head, keys.v_slot = v.stride(0), v.stride(1), v.stride(2)
        keys.count, keys.positions = tensors.keys.shape[1], tensors.keys.data_ptr()

    # ── the block's weights, as the library reads them ───────────────────────────────────────────────────

    def _lay_out(self) -> c.Block:
        block, spec = self._block, self._block.spec
        out = c.Block(
            d_model=self._d_model(), n_branches=len(spec.branches), parallel=spec.parallel, shared_norm=spec.shared_norm
        )
        for place, branch in enumerate(block.branches.values()):
            assert isinstance(branch, Branch)
            to = out.branches[place]
            to.pre, to.out, to.post = (self._norm(n) for n in (branch.pre_norm, branch.out_norm, branch.post_norm))
            to.scale = branch.spec.scale
            if isinstance(branch.body, Attention):
                to.kind, to.attention = 0, self._lay_attention(branch.body)
            else:
                assert isinstance(branch.body, Mlp)
                to.kind, to.feedforward = 1, self._mlp(branch.body)
        return out

    def _d_model(self) -> int:
        first = next(m for m in self._block.modules() if isinstance(m, Linear))
        return int(first.weight.shape[1])

    def _lay_attention(self, a: Attention) -> c.Attention:
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
        at = _address(module._parameters.get(name))
        self._held.append((module._parameters, name, at))
        return at


def _address(weight: Tensor | None) -> int:
    """Where a weight's numbers lie; 0 where there is none."""
    if weight is None:
        return 0
    if isinstance(weight, Stored):
        return weight.raw.data_ptr()
    assert weight.is_contiguous()
    assert weight.dtype is torch.float32
    return weight.data_ptr()


def fused_blocks(blocks: Iterable[Block], native: NativeLibrary) -> list[Runner]:
    """A fused block for each that the library knows, and the block itself for the others."""
    shared = Shared()
    return [block if why_not(block.spec) else FusedBlock(block, native, shared) for block in blocks]
