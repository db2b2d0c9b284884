"""Blocks run whole by the native library: an implementation of the readable block, never another definition.

Layers that follow one another are one call, so that Python's share of a token is small.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import pointer
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from cutaway.cache import Cache, LayerView, StoredCache
from cutaway.cache.passing import PassingView
from cutaway.cache.slots import Slots, SlotView
from cutaway.kernels import NativeLibrary, followed
from cutaway.kernels import layout as c
from cutaway.models.as_laid import Weights, joined
from cutaway.models.laid_out import EVERYWHERE, LaidOut, laid_out_norm, why_not
from cutaway.models.tokens import Groups, Tokens
from cutaway.modules.attention import LayerInputs
from cutaway.modules.block import Block
from cutaway.modules.stack import Stack
from cutaway.spec import StackSpec

Inputs = Callable[[int], LayerInputs]


@dataclass(slots=True)
class Kept:
    """The structs of a pass, for the next one in the same memory.

    Attributes:
        memory: where keys and values lie, as long as it is there.
        weights: of all layers, and of the norm after them.
        norm: that one. after: where it was.
        layers: all of them.
        first: the first layer of each group.
        width: of the stream.
        modules: the layers themselves.
    """

    memory: tuple[ref[object], ...]
    weights: Weights
    norm: c.Norm
    after: nn.Module
    layers: Any
    first: list[int]
    width: int
    modules: dict[str, nn.Module | None]


class FusedStack:
    """Runs the layers of a stack, those that the native library knows through it.

    As they are where gradients are wanted, in training, where rows hold several documents, where somebody hooked a
    function to a block or put something else in its place, and where attention is not to be the fused one.

    Args:
        stack: whose layers, in order, and norm after the last.
        native: the library.
    """

    def __init__(self, stack: Stack, native: NativeLibrary) -> None:
        self._of = ref(stack)  # which has this one: a model goes when nobody has it any more
        self.native = native
        self._kept: Kept | None = None
        self._layers: dict[str, nn.Module | None] = {}
        self._spec: StackSpec | None = None
        self._known: list[LaidOut | None] = []

    @property
    def _stack(self) -> Stack:
        stack = self._of()
        assert stack is not None
        return stack

    @property
    def known(self) -> list[LaidOut | None]:
        """Of each layer, or None where the native library does not know it."""
        now = self._stack.layers._modules
        if now != self._layers or self._spec is not self._stack.spec:
            specs = self._stack.spec.layers
            blocks = [*zip(now.values(), [*specs, *[None] * len(now)], strict=False)]
            # One put there that keeps other keys than the cache was made for is left to itself.
            self._known = [
                LaidOut(b) if isinstance(b, Block) and b.spec == spec and not why_not(b.spec) else None
                for b, spec in blocks
            ]
            self._layers, self._spec = dict(now), self._stack.spec
        return self._known

    @property
    def entire(self) -> bool:
        """Whether every layer is known."""
        return None not in self.known

    def ready(self, width: int) -> bool:
        """Whether the native library can be called with all layers and the norm as they are now."""
        whole = all(laid is not None and laid.ready(width) for laid in self.known)
        return whole and laid_out_norm(self._stack.norm, width) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedStack, (self._stack, self.native)

    def __call__(self, x: Tensor, cache: Cache, inputs: Inputs, layers: range, finish: bool, ends: bool) -> Tensor:
        """As some blocks one after the other, and perhaps the norm. [batch, query, d_model] → the same

        Where only the rows' ``ends`` are asked for, the others' queries of the last layer are nobody's.
        """
        first = inputs(layers.start)
        plain = torch.is_grad_enabled() or first.how not in ("fused", "steady") or x.dtype is not torch.float32
        known, blocks = self.known, [*self._stack.layers]
        if plain or followed(x) or first.view.plan.query_segments is not None or not x.numel() or self._stack.training:
            for i in layers:
                x = blocks[i](x, inputs(i))
            return self._finish(x) if finish else x
        tokens, width = Tokens(first.view.plan.queries), x.shape[-1]
        whole = finish and len(layers) == len(blocks)
        if whole and isinstance(cache, StoredCache) and (kept := self.kept_for(cache, width)) is not None:
            return self._again(x, inputs, tokens, kept, ends)
        ready = [laid if laid and i in layers and laid.ready(width) else None for i, laid in enumerate(known)]
        norm = laid_out_norm(self._stack.norm, width) if finish else None
        memory = cache.memory() if whole and isinstance(cache, StoredCache) and norm is not None else None
        i, done = layers.start, not finish
        while i < layers.stop:
            run: list[tuple[LaidOut, LayerInputs]] = []
            for j, laid in enumerate(ready[i : layers.stop], i):
                given = inputs(j)
                if laid is None or not _is_direct(given.view):
                    break
                run.append((laid, given))
            after = i + max(len(run), 1)
            last = norm if after == layers.stop else None
            done = not finish or last is not None
            if run:
                x = self._run(x, run, tokens, memory if len(run) == len(blocks) else None, last, ends)
            elif (laid := ready[i]) is not None:
                x = self._halves(x, laid, inputs(i), tokens, last)
            else:
                x, done = blocks[i](x, inputs(i)), not finish
            i = after
        return x if done else self._finish(x)

    def _finish(self, x: Tensor) -> Tensor:
        """The norm after the last layer, where that was no native one."""
        y: Tensor = self._stack.norm(x)
        return y

    def kept_for(self, cache: StoredCache, width: int, step: bool = False) -> Kept | None:
        """The structs of an earlier pass, if all layers can be called with them in the one that was planned.

        Before a ``step`` of single tokens only what was noted since the last pass is looked at.
        """
        kept = self._kept  # of whichever thread came last: looked at once
        if kept is None or any(EVERYWHERE) or kept.width != width or kept.after is not self._stack.norm:
            return None
        if kept.modules != self._stack.layers._modules:
            return None
        if (memory := cache.memory()) is None or len(memory) != len(kept.memory):
            return None
        if not all(held() is one for held, one in zip(kept.memory, memory, strict=True)):
            return None
        if step:
            return kept if kept.weights.untouched() else None
        return kept if kept.weights.current() and not any(kept.weights.hooks) else None

    def _again(self, x: Tensor, inputs: Inputs, tokens: Tokens, kept: Kept, ends: bool) -> Tensor:
        """All layers, whose keys and values lie where they lay."""
        groups = Groups(tokens)
        for i in kept.first:  # of each group, in their order
            given = inputs(i)
            groups.add(given.view.plan, slots_of(given.view), given.rotary)
        return self._call(x, kept.layers, groups, tokens, last=kept.norm, ends=ends)

    def _run(
        self,
        x: Tensor,
        run: list[tuple[LaidOut, LayerInputs]],
        tokens: Tokens,
        memory: tuple[object, ...] | None,
        last: c.Norm | None,
        ends: bool,
    ) -> Tensor:
        """Layers whose keys and values are written to slots and read from there, in one call."""
        groups = Groups(tokens)
        layers = (c.Layer * len(run))()
        scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        own = torch.arange(tokens.n)
        first: list[int] = []
        for i, (layer, (laid, given)) in enumerate(zip(layers, run, strict=True)):
            layer.block = pointer(laid.struct)
            view = given.view
            if isinstance(view, SlotView):
                k, v, slots = view.k, view.v, slots_of(view)
            else:  # nothing is remembered: one layer's keys and values may lie over another's
                if _sizes(laid) not in scratch:
                    scratch[_sizes(laid)] = _empty(laid, tokens)
                (k, v), slots = scratch[_sizes(laid)], own
            _write(layer, k, v)
            _read(layer, k, v)
            layer.group = groups.add(view.plan, slots, given.rotary)
            if layer.group == len(first):
                first.append(i)
        if memory is not None:
            after, weights = self._stack.norm, joined(laid.weights for laid, _ in run)
            norm = laid_out_norm(after, x.shape[-1], weights)
            assert norm is not None, "there is no memory where it is to be called"
            self._kept = Kept(
                tuple(map(ref, memory)),
                weights,
                norm,
                after,
                layers,
                first,
                x.shape[-1],
                self._layers,
            )
        return self._call(x, layers, groups, tokens, last=last, ends=ends and last is not None)

    def _halves(self, x: Tensor, laid: LaidOut, given: LayerInputs, tokens: Tokens, last: c.Norm | None) -> Tensor:
        """A layer whose view makes something of keys and values before they are read."""
        layers, groups = (c.Layer * 1)(), Groups(tokens)
        k, v = (part.zero_() for part in _empty(laid, tokens))
        q = torch.empty(tokens.count, laid.attention.n_heads * laid.attention.d_head, dtype=torch.float32)
        layers[0].block = pointer(laid.struct)
        _write(layers[0], k, v)
        layers[0].group = groups.add(given.view.plan, torch.arange(tokens.n), given.rotary)
        self._call(x, layers, groups, tokens, q, half=1)
        keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in given.view.update(k, v))
        _read(layers[0], keys, values)
        return self._call(x, layers, groups, tokens, q, half=2, last=last)

    def _call(
        self,
        x: Tensor,
        layers: Any,
        groups: Groups,
        tokens: Tokens,
        q: Tensor | None = None,
        half: int = 0,
        last: c.Norm | None = None,
        ends: bool = False,
    ) -> Tensor:
        x, asked = x.contiguous(), tokens.ends() if ends else None
        y = x.clone() if not tokens.whole or ends else torch.empty_like(x)
        given = c.Pass(
            x=x.data_ptr(),
            y=y.data_ptr(),
            n=tokens.count,
            places=tokens.places.data_ptr(),
            rows=tokens.rows.data_ptr(),
            positions=tokens.positions.data_ptr(),
            batch=tokens.batch,
            q=None if q is None else q.data_ptr(),
            half=half,
            asked=None if asked is None else asked.data_ptr(),
            n_asked=0 if asked is None else len(asked),
            norm=last or c.Norm(),
        )
        self.native.layers(given, layers, groups.array())
        return y


def _is_direct(view: LayerView) -> bool:
    """Whether keys and values are read from where they are written, as they are."""
    if isinstance(view, SlotView):
        return isinstance(view.places, Slots) and not view.places.join and view.k.dtype is torch.float32
    return isinstance(view, PassingView)


def slots_of(view: LayerView) -> Tensor:
    """Where a view that is direct writes."""
    assert isinstance(view, SlotView)
    assert isinstance(view.places, Slots)
    return view.places.slots


def _sizes(laid: LaidOut) -> tuple[int, int]:
    return laid.attention.n_kv_heads, laid.attention.d_head


def _empty(laid: LaidOut, tokens: Tokens) -> tuple[Tensor, Tensor]:
    heads, width = _sizes(laid)
    sizes = tokens.batch, heads, tokens.n, width
    return torch.empty(sizes, dtype=torch.float32), torch.empty(sizes, dtype=torch.float32)


def _write(layer: c.Layer, k: Tensor, v: Tensor) -> None:
    layer.k, layer.v = k.data_ptr(), v.data_ptr()
    layer.row, layer.head, layer.slot, _ = k.stride()


def _read(layer: c.Layer, k: Tensor, v: Tensor) -> None:
    keys = layer.keys
    keys.k, keys.v = k.data_ptr(), v.data_ptr()
    keys.k_row, keys.k_head, keys.k_slot, _ = k.stride()
    keys.v_row, keys.v_head, keys.v_slot, _ = v.stride()
