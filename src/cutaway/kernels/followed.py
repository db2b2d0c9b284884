"""What PyTorch follows, so that the native library, which would lose it, is not asked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad


def followed(*tensors: Tensor | None) -> bool:
    """Whether PyTorch follows what becomes of one of them: for gradients, for tangents, or in ``torch.func``."""
    there = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in there):
        return True
    if torch.compiler.is_compiling():  # which follows by itself, and cannot look
        return False
    return any(wrapped(t) or forward_ad.unpack_dual(t).tangent is not None for t in there)


def untransformed() -> AbstractContextManager[object]:
    """Outside of ``torch.func``'s transforms, in which even a new tensor lies nowhere."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    return temporarily_clear_interpreter_stack() if inside else nullcontext()


def wrapped(x: Tensor) -> bool:
    """Whether it is a tensor of one of ``torch.func``'s transforms, which lies nowhere."""
    found: bool = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return found
