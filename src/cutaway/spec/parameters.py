"""Every parameter of a model by name, with its shape, known from the spec alone.

The names are those of ``Transformer.state_dict()``; a test compares them for every family.
"""

from __future__ import annotations

from typing import TypeAlias

from cutaway.spec.attention import AttentionSpec
from cutaway.spec.block import BranchSpec
from cutaway.spec.head import ClassifierSpec, HeadSpec, PoolerSpec, TransformSpec
from cutaway.spec.mlp import MlpSpec, MoeSpec
from cutaway.spec.model import EmbeddingSpec, ModelSpec, StackSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.position import BucketBias, LearnedPositions

__all__ = ["parameter_shapes"]

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def parameter_shapes(spec: ModelSpec) -> Shapes:
    """Name → shape of every parameter."""
    d = spec.d_model
    found = _embedding("embed", spec.embedding, spec.vocab_size, d)
    if spec.source is not None:
        found |= _embedding("source_embed", spec.source, spec.source_vocab_size, d)
    for name, stack in spec.stacks.items():
        found |= _stack(name, stack, d)
    match spec.head:
        case HeadSpec() as head:
            found |= _transform("head.transform", head.transform, d)
            if not head.tied:
                found["head.weight"] = (spec.vocab_size, d)
            if head.bias:
                found["head.bias"] = (spec.vocab_size,)
        case PoolerSpec() as pooler:
            found |= _transform("head.transform", pooler.transform, d)
        case ClassifierSpec() as classifier:
            if classifier.pooler is not None:
                found |= _transform("head.pooler.transform", classifier.pooler.transform, d)
            found |= _transform("head.transform", classifier.transform, d)
            found |= _linear("head.out", d, len(classifier.labels), classifier.bias)
        case None:
            pass
    return found


def _embedding(at: str, spec: EmbeddingSpec, rows: int | None, d: int) -> Shapes:
    found: Shapes = {} if rows is None else {f"{at}.tokens": (rows, d)}
    if isinstance(spec.positions, LearnedPositions):
        found[f"{at}.positions"] = (spec.positions.n_rows, d)
    if spec.types:
        found[f"{at}.types"] = (spec.types, d)
    return found | _norm(f"{at}.norm", spec.norm, d)


def _stack(at: str, stack: StackSpec, d: int) -> Shapes:
    found: Shapes = {}
    for i, layer in enumerate(stack.layers):
        for branch in layer.branches:
            found |= _branch(f"{at}.layers.{i}.branches.{branch.name}", branch, d)
    found |= _norm(f"{at}.norm", stack.norm, d)
    heads = {layer.attention.bias: layer.attention.n_heads for layer in stack.layers}
    biases = [(bias, n_heads) for bias, n_heads in heads.items() if bias is not None]
    for i, (bias, n_heads) in enumerate(biases):
        if isinstance(bias, BucketBias):
            found[f"{at}.biases.{i}.weight"] = (bias.n_buckets, n_heads)
    return found


def _transform(at: str, spec: TransformSpec | None, d: int) -> Shapes:
    return {} if spec is None else _linear(f"{at}.dense", d, d, spec.bias) | _norm(f"{at}.norm", spec.norm, d)


def _norm(name: str, spec: NormSpec | None, width: int) -> Shapes:
    found: Shapes = {}
    if spec is not None:
        found[f"{name}.weight"] = (width,)
        if spec.bias:
            found[f"{name}.bias"] = (width,)
    return found


def _linear(name: str, n_in: int, n_out: int, bias: bool = False) -> Shapes:
    found: Shapes = {f"{name}.weight": (n_out, n_in)}
    if bias:
        found[f"{name}.bias"] = (n_out,)
    return found


def _branch(at: str, branch: BranchSpec, d: int) -> Shapes:
    found = _norm(f"{at}.pre_norm", branch.pre_norm, d)
    match branch.body:
        case AttentionSpec() as attention:
            found |= _attention(f"{at}.body", attention, d)
        case MlpSpec() as mlp:
            if mlp.gated:
                found |= _linear(f"{at}.body.gate", d, mlp.d_ff, mlp.bias)
            found |= _linear(f"{at}.body.up", d, mlp.d_ff, mlp.bias)
            found |= _linear(f"{at}.body.down", mlp.d_ff, d, mlp.out_bias)
        case MoeSpec() as moe:
            n, d_ff = moe.n_experts, moe.expert.d_ff
            found |= _linear(f"{at}.body.router", d, n)
            if moe.expert.gated:
                found[f"{at}.body.gate"] = (n, d_ff, d)
            found |= {f"{at}.body.up": (n, d_ff, d), f"{at}.body.down": (n, d, d_ff)}
    found |= _norm(f"{at}.out_norm", branch.out_norm, d)
    return found | _norm(f"{at}.post_norm", branch.post_norm, d)


def _attention(at: str, spec: AttentionSpec, d: int) -> Shapes:
    found: Shapes = {}
    heads = {"q": spec.n_heads, "k": spec.n_kv_heads, "v": spec.n_kv_heads}
    for name, n in heads.items():
        found |= _linear(f"{at}.{name}", d, n * spec.d_head, spec.qkv_bias)
    for name in "qk":
        width = spec.d_head * (heads[name] if spec.qk_norm_over == "width" else 1)
        found |= _norm(f"{at}.{name}_norm", spec.qk_norm, width)
    found |= _linear(f"{at}.out", spec.n_heads * spec.d_head, d, spec.out_bias)
    near = spec.relative
    if near is not None:
        rows = (2 * near.max_distance + 1, spec.d_head)
        found[f"{at}.near_keys"] = rows
        if near.values:
            found[f"{at}.near_values"] = rows
    return found
