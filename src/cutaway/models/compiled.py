"""Blocks run through ``torch.compile``: an implementation of the readable block, never another definition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from cutaway.cache import MaskKind
from cutaway.cache.mask import LARGEST_MASK
from cutaway.modules.attention import LayerInputs
from cutaway.modules.block import Block
from cutaway.modules.tap import Tap
from cutaway.spec import BlockSpec, MoeSpec

# Graphs of one kind of block. What multiplies them: prompt or single step, cache or none, ring or not, ragged rows
# or not, watched gradients or not; never the layer's number, nor a length.
MOST_GRAPHS = 64


class CompiledBlock:
    """Calls a block through its kind's compiled function.

    As it is where somebody watches, the pass is too long, attention is not to be the fused one, or tokens go to
    experts, as many as there happen to be.

    Args:
        block: whose weights.
        run: the compiled function, shared by all blocks of equal spec.
    """

    def __init__(self, block: Block, run: _Run) -> None:
        self._block = block
        self._run = run

    def __call__(self, x: Tensor, inputs: LayerInputs, tap: Tap | None = None) -> Tensor:
        """As :meth:`Block.forward`."""
        plan = inputs.view.plan
        most = max(plan.keys.shape[1], 0 if inputs.cross is None else inputs.cross.plan.keys.shape[1])
        pairs = plan.queries.numel() * most * self._block.spec.attention.n_heads
        routed = any(isinstance(branch.body, MoeSpec) for branch in self._block.spec.branches)
        # Past that many pairs attention goes piece by piece, and tokens go to their experts: Python loops. The other
        # ways of attention are there to be themselves: a compiler may change the order of a steady one's sums.
        if tap is not None or routed or inputs.how != "fused" or pairs > LARGEST_MASK:
            return self._block(x, inputs, tap)
        if plan.kind is MaskKind.FULL and plan.rule.window is not None:
            # The short cut ends where the window does; a graph that never takes it goes on.
            plan.kind, plan.mask = MaskKind.RULE, plan.piece(0, plan.queries.shape[1])
        return self._run(self._block, x, inputs)


class _Run(Protocol):
    def __call__(self, block: Block, x: Tensor, inputs: LayerInputs) -> Tensor: ...


def _plain(block: Block, x: Tensor, inputs: LayerInputs) -> Tensor:
    # A module that is an argument has its weights as inputs of the graph, so that blocks can share it.
    return block(x, inputs)


def compiled_blocks(blocks: Iterable[Block], **options: Any) -> list[CompiledBlock]:
    """A compiled block for each, with one compiled function for each distinct spec.

    All sizes that are not the model's own are symbols, so that a cache may grow.

    Args:
        blocks: in order.
        options: for ``torch.compile``, such as ``mode`` or ``backend``.
    """
    settings = {
        "dynamic": True,
        "fullgraph": True,
        "isolate_recompiles": True,
        "recompile_limit": MOST_GRAPHS,
        **options,
    }
    runs: dict[BlockSpec, _Run] = {}
    out = []
    for block in blocks:
        if block.spec not in runs:
            runs[block.spec] = torch.compile(_plain, **settings)
        out.append(CompiledBlock(block, runs[block.spec]))
    return out
