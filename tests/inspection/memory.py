"""What is alive."""

from __future__ import annotations

import gc

import torch
from torch import Tensor


def bytes_alive() -> int:
    """Bytes behind all tensors that Python can reach."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
