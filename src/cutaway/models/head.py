"""From the stream's last vectors to an answer: scores of tokens, one vector for a text, scores of labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.modules.activation import ACTIVATIONS
from cutaway.modules.linear import Linear, Product
from cutaway.modules.norm import norm_or_identity
from cutaway.modules.part import Identity, Part
from cutaway.modules.tap import Tap
from cutaway.shapes import Logits, Positions, Stream
from cutaway.spec import ClassifierSpec, HeadSpec, PoolerSpec, TransformSpec


class Transform(Part):
    """``norm(act(W x + b))``.

    Args:
        spec: curve, bias and norm.
        d_model: width of the vectors.
    """

    def __init__(self, spec: TransformSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.dense = Linear(d_model, d_model, spec.bias)
        self.norm = norm_or_identity(spec.norm, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] → the same"""
        y: Tensor = self.norm(ACTIVATIONS[self.spec.activation](self.dense(x)))
        return y


def _transform(spec: TransformSpec | None, d_model: int) -> nn.Module:
    return Identity() if spec is None else Transform(spec, d_model)


class Head(Part):
    """The language modelling head: a score for each token of the vocabulary.

    Args:
        spec: tied or not, biased, scaled, capped, transformed before.
        vocab_size, d_model: rows and width of its matrix.
    """

    def __init__(self, spec: HeadSpec, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.transform = _transform(spec.transform, d_model)
        self.weight = None if spec.tied else nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if spec.bias else None
        self.product: Product = F.linear  # or another implementation of it: see Transformer.use_kernels

    def forward(self, x: Stream, embedding: Tensor, tap: Tap | None = None) -> Logits:
        """Taps ``head.transform`` where there is one, and ``logits``.

        ``embedding`` is the input table, which a tied head uses. [vocab, d_model]
        """
        if self.spec.transform is not None:
            x = self.transform(x)
            inner = None if tap is None else tap.at("head")
            x = x if inner is None else inner("transform", x)
        logits = finished(self.product(x, embedding if self.weight is None else self.weight, self.bias), self.spec)
        return logits if tap is None else tap("logits", logits)


def finished(logits: Tensor, spec: HeadSpec) -> Tensor:
    """Scaled and capped. [..., vocab] → the same"""
    if spec.scale != 1.0:
        logits = logits * spec.scale
    if spec.soft_cap is not None:
        logits = torch.tanh(logits / spec.soft_cap) * spec.soft_cap
    return logits


class Pooler(Part):
    """One vector for each text.

    Args:
        spec: whose vector, and what becomes of it.
        d_model: width of the vectors.
    """

    def __init__(self, spec: PoolerSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.transform = _transform(spec.transform, d_model)

    def forward(self, x: Stream, positions: Positions, tap: Tap | None = None) -> Tensor:
        """Taps ``head.pooled`` before the transform and ``head.transform`` after it. [batch, d_model]

        ``positions`` tell pads (−1) from tokens. [batch, query]
        """
        inner = None if tap is None else tap.at("head")
        x = pooled(x, positions, self.spec.pool)
        x = x if inner is None else inner("pooled", x)
        if self.spec.dropout:
            x = F.dropout(x, self.spec.dropout, self.training)
        if self.spec.transform is None:
            return x
        x = self.transform(x)
        return x if inner is None else inner("transform", x)


class Classifier(Part):
    """A score for each label, of a text or of each token.

    Args:
        spec: the labels and how a text becomes one vector.
        d_model: width of the vectors.
    """

    def __init__(self, spec: ClassifierSpec, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.pooler = None if spec.pooler is None else Pooler(spec.pooler, d_model)
        self.transform = _transform(spec.transform, d_model)
        self.out = Linear(d_model, len(spec.labels), spec.bias)

    def forward(self, x: Stream, positions: Positions, tap: Tap | None = None) -> Tensor:
        """Taps ``head.transform`` where there is one, and ``logits``. [batch, label], or [batch, query, label]"""
        if self.pooler is not None:
            x = self.pooler(x, positions, tap)
        if self.spec.transform is not None:
            x = self.transform(x)
            inner = None if tap is None else tap.at("head")
            x = x if inner is None else inner("transform", x)
        if self.spec.dropout:
            x = F.dropout(x, self.spec.dropout, self.training)
        logits = self.out(x)
        return logits if tap is None else tap("logits", logits)


def pooled(x: Stream, positions: Positions, pool: str) -> Tensor:
    """One vector for each row, of its tokens alone: what pads hold makes no difference. [batch, d_model]

    Args:
        x: vectors of the tokens. [batch, query, d_model]
        positions: −1 where there is none. [batch, query]
        pool: the ``"first"`` or ``"last"`` token's, the ``"mean"`` of all, or the largest of each channel (``"max"``).
    """
    real = positions >= 0
    if pool == "mean":
        total = torch.where(real[..., None], x, 0.0).sum(1)
        return total / real.sum(1, keepdim=True).clamp(min=1).to(x.dtype)
    if pool == "max":
        return torch.where(real[..., None], x, float("-inf")).amax(1)
    places = torch.arange(x.shape[1], device=x.device)
    at = torch.where(real, places, -1).argmax(1) if pool == "last" else real.int().argmax(1)
    return x[torch.arange(len(x), device=x.device), at]
