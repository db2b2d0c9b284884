"""Numbers of the model's own kind, whatever precision the caller mixes elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def unmixed(device: torch.device) -> AbstractContextManager[object]:
    """Where ``torch.autocast`` of the caller's stops.

    Keys and values that are kept from pass to pass have one type, and a step of an answer is a row of one whole pass:
    neither holds where some products are in half precision and others are not.
    """
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
