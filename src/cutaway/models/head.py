"""Vectors to logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.modules.tap import Tap
from cutaway.shapes import Logits, Stream
from cutaway.spec import HeadSpec


class Head(nn.Module):
    """The language modelling head: a score for each token of the vocabulary.

    Args:
        spec: tied or not, biased, scaled, capped.
        vocab_size, d_model: rows and width of its matrix.
    """

    def __init__(self, spec: HeadSpec, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = None if spec.tied else nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if spec.bias else None

    def forward(self, x: Stream, embedding: Tensor, tap: Tap | None = None) -> Logits:
        """Taps ``logits``. ``embedding`` is the input table, which a tied head uses. [vocab, d_model]"""
        logits = F.linear(x, embedding if self.weight is None else self.weight, self.bias)
        if self.spec.scale != 1.0:
            logits = logits * self.spec.scale
        if self.spec.soft_cap is not None:
            logits = torch.tanh(logits / self.spec.soft_cap) * self.spec.soft_cap
        return logits if tap is None else tap("logits", logits)
