"""A few seconds of proof that this installation computes what it should, with no file and no network."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.generation.session import Session
from cutaway.models import Transformer
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    MaskRule,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RotarySpec,
    StackSpec,
)

_TOLERANCE = 1e-3  # logits of scaled random weights are of size 10; two right ways differ by some 1e-5
_LENGTH = 48


@dataclass(frozen=True, slots=True)
class Check:
    """What was compared, the largest difference, and whether that is small enough."""

    name: str
    difference: float
    ok: bool
    seconds: float


def tiny_model(seed: int = 0) -> Transformer:
    """Three layers with grouped heads, a window and rotary positions, and weights that let no mistake hide."""
    norm = NormSpec("rms", 1e-5)

    def layer(window: int | None) -> BlockSpec:
        attention = AttentionSpec(4, 2, 16, mask=MaskRule(window=window), rotary=RotarySpec(10_000.0, 16))
        mlp = MlpSpec(128, "silu", gated=True)
        return BlockSpec((BranchSpec("attn", attention, pre_norm=norm), BranchSpec("mlp", mlp, pre_norm=norm)))

    stack = StackSpec((layer(None), layer(16), layer(None)), norm)
    model = Transformer(ModelSpec("cutaway", 256, 64, 512, EmbeddingSpec(), stack, HeadSpec(tied=False)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.25 * noise if parameter.dim() > 1 else 1 + 0.5 * noise)
    return model.eval()


def run(model: Transformer | None = None) -> list[Check]:
    """Every check on a tiny random model."""
    model = tiny_model() if model is None else model
    ids = torch.randint(0, model.spec.vocab_size, (1, _LENGTH), generator=torch.Generator().manual_seed(1))
    plain = model(ids)[0].detach()
    return [
        _compare("fused attention = explicit attention", plain, lambda: _explicit(model, ids)),
        _compare("with a cache, token by token = one pass", plain, lambda: _cached(model, ids, 1)),
        _compare("with a cache, in pieces of seven = one pass", plain, lambda: _cached(model, ids, 7)),
        _compare("beside a longer neighbour = alone", plain[-1], lambda: _batched(model, ids)),
    ]


def _compare(name: str, wanted: Tensor, compute: Callable[[], Tensor]) -> Check:
    start = time.perf_counter()
    difference = float((compute() - wanted).abs().max())
    return Check(name, difference, difference <= _TOLERANCE, time.perf_counter() - start)  # NaN is not ≤


@torch.no_grad()
def _explicit(model: Transformer, ids: Tensor) -> Tensor:
    model.attention = "explicit"
    try:
        return model(ids)[0]
    finally:
        model.attention = "fused"


@torch.no_grad()
def _cached(model: Transformer, ids: Tensor, step: int) -> Tensor:
    cache = model.new_cache(1, 8)
    return torch.cat([model(piece, cache=cache)[0] for piece in ids.split(step, dim=1)])


def _batched(model: Transformer, ids: Tensor) -> Tensor:
    row: list[int] = ids[0].tolist()
    return Session(model, 2, 8).feed([row, [*reversed(row), *row]])[0]
