"""Which implementation of the blocks runs: the readable ones, compiled ones, or the native library."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from cutaway.errors import RequestError
from cutaway.kernels import Grouped, Stored, grouped, grouped_natively, library, multiply
from cutaway.models.compiled import compiled_blocks
from cutaway.models.fused import FusedStack
from cutaway.models.head import Head
from cutaway.models.steps import Steps
from cutaway.modules.block import Block
from cutaway.modules.embedding import Embedding
from cutaway.modules.linear import Linear, Product
from cutaway.modules.moe import Moe
from cutaway.modules.stack import Stack


@runtime_checkable
class Stacked(Protocol):
    """A model of two stacks, either of which may be empty; ``steps`` is how a token at a time is run, if otherwise."""

    embed: Embedding
    encoder: Stack
    decoder: Stack
    head: Any
    steps: Steps | None

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def modules(self) -> Any: ...
    def parameters(self) -> Any: ...


def compiled(model: Stacked, enabled: bool = True, **options: Any) -> None:
    """Run the blocks through ``torch.compile`` from now on, or no longer.

    The first passes take as long as compiling does. A pass that is watched runs uncompiled.

    Args:
        model: whose blocks.
        enabled: False goes back to the plain blocks.
        options: for ``torch.compile``, such as ``mode`` or ``backend``.

    Raises:
        RequestError: weights are kept as their file has them.
    """
    if enabled and any(isinstance(parameter, Stored) for parameter in model.parameters()):
        hint = 'Load it with dtype="float32".'
        raise RequestError("weights in their file's form cannot be compiled", field="dtype", hint=hint)
    _multiply(model, F.linear, grouped)
    model.steps = None
    for stack in (model.encoder, model.decoder):
        stack.whole = None
        stack.runners = [*compiled_blocks(_blocks(stack), **options)] if enabled else None


def native(model: Stacked, enabled: bool = True, stepping: bool = True) -> bool:
    """Run the blocks that the native library knows through it from now on, or no longer.

    A pass that is watched, or that keeps gradients, runs the plain blocks.

    Args:
        model: whose blocks.
        enabled: False goes back to the plain blocks.
        stepping: whether a token at a time may go past the model's own ``hidden`` and ``unembed``.

    Returns:
        Whether there is a library, and the weights are fp32 on a CPU.
    """
    found = library() if enabled and model.device.type == "cpu" and model.dtype is torch.float32 else None
    for stack in (model.encoder, model.decoder):
        blocks = _blocks(stack)
        stack.runners = None
        stack.whole = FusedStack(stack, found) if found is not None and blocks else None
    _multiply(model, *((F.linear, grouped) if found is None else (multiply, grouped_natively)))
    whole, head = model.decoder.whole, model.head
    able = stepping and isinstance(whole, FusedStack) and whole.entire and isinstance(head, Head)
    model.steps = Steps(model, whole) if able else None  # type: ignore[arg-type]
    return found is not None


def _blocks(stack: Stack) -> list[Block]:
    return [block for block in stack.layers if isinstance(block, Block)]


def _multiply(model: Stacked, product: Product, groups: Grouped) -> None:
    for module in model.modules():
        # Somebody else's stays.
        if isinstance(module, (Linear, Head)) and module.product in (F.linear, multiply):
            module.product = product
        if isinstance(module, Moe) and module.product in (grouped, grouped_natively):
            module.product = groups
