"""Centring: what a stream of LayerNorms carries along all channels alike is never read, and can be left out."""

from __future__ import annotations

import torch

from cutaway.errors import RequestError
from cutaway.inspection.rewrite import Draft, Rewritten
from cutaway.models import Transformer
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    SinusoidalPositions,
    StackSpec,
)


@torch.no_grad()
def centre_writes(model: Transformer) -> Rewritten:
    """Everything that writes to the stream writes vectors of mean zero (Nanda & Bloom 2022): logits stay as they are.

    Valid where every reader of the stream is a LayerNorm, which takes the mean away itself. A tied head keeps the rows
    that it had, as a matrix of its own.

    Raises:
        RequestError: an RMSNorm or no norm at all reads the stream, or a norm or waves write to it.
    """
    spec = model.spec
    for at, embedding in (("embed", spec.embedding), ("source_embed", spec.source)):
        if embedding is not None:
            _check_embedding(at, embedding)
    for name, stack in spec.stacks.items():
        for i, block in enumerate(stack.layers):
            _check_block(f"{name}.layers.{i}", block)
        _check_reader(f"{name}.norm", stack.norm)
    draft = Draft(model)
    if isinstance(spec.head, HeadSpec):
        draft.untie()
    for name in ("tokens", "positions", "types"):
        for at in ("embed", "source_embed"):
            _centre_rows(draft, f"{at}.{name}", -1)
    for name, stack in spec.stacks.items():
        _centre_stack(draft, name, stack)
    return draft.finish("writes to the stream centred", "logits")


def _check_embedding(at: str, spec: EmbeddingSpec) -> None:
    if spec.norm is not None:
        what = "a norm writes the embedding to the stream (norm of the embedding), and what it writes has a mean"
        raise RequestError(what, field=f"{at}.norm")
    if isinstance(spec.positions, SinusoidalPositions):
        raise RequestError("waves are written to the stream (sinusoidal positions), not weights", field=at)


def _check_block(at: str, block: BlockSpec) -> None:
    for i, branch in enumerate(block.branches):
        name = f"{at}.{branch.name}"
        for word in ("out_norm", "post_norm"):
            if getattr(branch, word) is not None:
                what = f"a norm writes to the stream ({word}), and what it writes has a mean"
                raise RequestError(what, field=f"{name}.{word}")
        if i == 0 or not block.shared_norm:
            _check_reader(f"{name}.pre_norm", branch.pre_norm)


def _check_reader(name: str, norm: NormSpec | None) -> None:
    if norm is None:
        raise RequestError("the stream is read as it is (no norm), its mean too", field=name, expected="LayerNorm")
    if norm.kind != "layer":
        what = "an RMSNorm reads the stream (kind rms): it does not take the mean away, so the mean counts"
        raise RequestError(what, field=name, expected="LayerNorm", got="RMSNorm")


def _centre_rows(draft: Draft, name: str, axis: int) -> None:
    """Each row by itself: an embedding's, or an expert's matrix."""
    if draft.has(name):
        draft.change(name, lambda rows: rows - rows.mean(axis, keepdim=True))


def _centre_columns(draft: Draft, name: str) -> None:
    """What a matrix makes of any vector; a bias as a whole."""
    if draft.has(name):
        mean = draft.numbers(name).cpu().mean(0, dtype=torch.float64)
        draft.change(name, lambda rows: rows - mean)


def _centre_stack(draft: Draft, name: str, stack: StackSpec) -> None:
    for i, block in enumerate(stack.layers):
        for branch in block.branches:
            at = f"{name}.layers.{i}.branches.{branch.name}.body"
            match branch.body:
                case AttentionSpec():
                    _centre_columns(draft, f"{at}.out.weight")
                    _centre_columns(draft, f"{at}.out.bias")
                case MlpSpec():
                    _centre_columns(draft, f"{at}.down.weight")
                    _centre_columns(draft, f"{at}.down.bias")
                case MoeSpec():
                    _centre_rows(draft, f"{at}.down", 1)
