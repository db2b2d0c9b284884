"""What a cache gives to be saved: named tensors, which may have been through anybody's hands when they come back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cutaway.errors import ShapeMismatch

__all__ = ["inside", "take", "within"]


def take(state: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> Tensor:
    """One tensor of a saved state, if it is what is expected; None in a shape is any number.

    Raises:
        ShapeMismatch: it is missing, or of another shape or type.
    """
    if name not in state:
        raise ShapeMismatch("tensor is missing", field=name)
    found = state[name]
    fits = len(shape) == found.dim() and all(n is None or n == m for n, m in zip(shape, found.shape, strict=True))
    if not fits or found.dtype != dtype:
        wanted, got = f"{dtype} {[*shape]}", f"{found.dtype} {[*found.shape]}"
        raise ShapeMismatch("not what the model's cache holds", field=name, expected=wanted, got=got)
    return found


def within(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a part, under its name in the whole."""
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


def inside(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`within`: what of the whole is the part's."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
