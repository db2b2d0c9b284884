"""Every intermediate quantity of a model, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import TypeAlias

from cutaway.errors import NameNotFound
from cutaway.spec.attention import AttentionSpec
from cutaway.spec.block import BranchSpec
from cutaway.spec.head import ClassifierSpec, HeadSpec, PoolerSpec
from cutaway.spec.mlp import MlpSpec, MoeSpec
from cutaway.spec.model import EmbeddingSpec, ModelSpec, StackSpec

STREAM = ("batch", "query", "d_model")
SPREAD = ("batch", "query", "1")
SOURCE = {"query": "source", "key": "source_key"}  # tokens of an encoder–decoder's source

Axes: TypeAlias = dict[str, tuple[str, ...]]


def tap_names(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Name → axis words, in the order of the computation."""
    names: dict[str, tuple[str, ...]] = {}
    embeddings = {"decoder": ("embed", spec.embedding), "encoder": ("embed", spec.embedding)}
    if spec.source is not None:
        embeddings["encoder"] = ("source_embed", spec.source)
    for name, stack in spec.stacks.items():
        found = {**_embedding(*embeddings[name]), **_stack(name, stack)}
        # What an encoder–decoder computes of its source is there once, whatever the decoder does.
        once = spec.source is not None and name == "encoder"
        names |= {key: tuple(SOURCE.get(word, word) for word in axes) if once else axes for key, axes in found.items()}
    return names | _head(spec)


def _embedding(at: str, spec: EmbeddingSpec) -> Axes:
    names = {f"{at}.tokens": STREAM}
    if spec.positions is not None:
        names[f"{at}.positions"] = STREAM
    if spec.types:
        names[f"{at}.types"] = STREAM
    if spec.norm is not None:
        names[f"{at}.norm_scale"] = SPREAD
    return {**names, f"{at}.out": STREAM}


def _stack(name: str, stack: StackSpec) -> Axes:
    names: Axes = {}
    for i, layer in enumerate(stack.layers):
        at = f"{name}.layers.{i}"
        names[f"{at}.resid_in"] = STREAM
        for branch in layer.branches:
            names.update({f"{at}.{branch.name}.{inner}": axes for inner, axes in branch_names(branch).items()})
    if stack.norm is not None:
        names[f"{name}.norm.norm_scale"] = SPREAD
    return {**names, f"{name}.norm.out": STREAM}


def _head(spec: ModelSpec) -> Axes:
    text: tuple[str, ...] = ("batch", "d_model")
    match spec.head:
        case HeadSpec() as head:
            names: Axes = {} if head.transform is None else {"head.transform": STREAM}
            return names | {"logits": ("batch", "query", "vocab")}
        case PoolerSpec() as pooler:
            return {"head.pooled": text, **({} if pooler.transform is None else {"head.transform": text})}
        case ClassifierSpec(pooler=None) as each:
            names = {} if each.transform is None else {"head.transform": STREAM}
            return names | {"logits": ("batch", "query", "label")}
        case ClassifierSpec(pooler=PoolerSpec() as pooler):
            inner = {} if pooler.transform is None else {"head.transform": text}
            return {"head.pooled": text, **inner, "logits": ("batch", "label")}
        case _:
            return {}


@cache
def branch_names(branch: BranchSpec) -> Mapping[str, tuple[str, ...]]:
    """The same of one branch, by its inner names."""
    names: dict[str, tuple[str, ...]] = {}
    if branch.pre_norm is not None:
        names["norm_scale"] = SPREAD
    names["in"] = STREAM
    match branch.body:
        case AttentionSpec():
            names |= _attention(branch.body)
        case MlpSpec():
            names |= _mlp(branch.body)
        case MoeSpec():
            experts = ("batch", "query", "expert")
            names |= {"router_logits": experts, "router_weights": experts, "experts": (*experts, "d_model")}
    return names | {"body": STREAM, "out": STREAM, "resid": STREAM}


def _attention(spec: AttentionSpec) -> dict[str, tuple[str, ...]]:
    heads, kv_heads = ("batch", "query", "head", "d_head"), ("batch", "query", "kv_head", "d_head")
    if spec.cross:
        kv_heads = ("batch", "source", "kv_head", "d_head")
    names: dict[str, tuple[str, ...]] = {"q": heads, "k": kv_heads, "v": kv_heads}
    if spec.rotary is not None:
        names |= {"q_rot": heads, "k_rot": kv_heads}
    pattern = ("batch", "head", "query", "source" if spec.cross else "key")
    out = ("batch", "query", "head", "d_model")
    return names | {"scores": pattern, "weights": pattern, "z": heads, "head_out": out}


def _mlp(spec: MlpSpec) -> dict[str, tuple[str, ...]]:
    inside: tuple[str, ...] = ("batch", "query", "d_ff")
    return {"up": inside, **({"gate": inside} if spec.gated else {}), "act": inside}


def axis_sizes(spec: ModelSpec, name: str) -> dict[str, int]:
    """The size of each axis word that the model fixes, where ``name`` is computed."""
    sizes = {"d_model": spec.d_model, "vocab": spec.vocab_size, "1": 1}
    if isinstance(spec.head, ClassifierSpec):
        sizes["label"] = len(spec.head.labels)
    parts = name.split(".")
    if parts[0] in spec.stacks and parts[1] == "layers" and len(parts) == 5:
        branch = next(b for b in spec.stacks[parts[0]].layers[int(parts[2])].branches if b.name == parts[3])
        if isinstance(branch.body, AttentionSpec):
            body = branch.body
            sizes |= {"head": body.n_heads, "kv_head": body.n_kv_heads, "d_head": body.d_head}
        elif isinstance(branch.body, MoeSpec):
            sizes["expert"] = branch.body.n_experts
        else:
            sizes["d_ff"] = branch.body.d_ff
    return sizes


def match(patterns: Iterable[str], names: Mapping[str, object]) -> list[str]:
    """The names that any pattern (``*``, ``?``, ``[…]``) matches, in the order of the computation.

    Raises:
        NameNotFound: a pattern matches nothing; the hint has the nearest names.
    """
    found: set[str] = set()
    for pattern in patterns:
        if pattern in names:
            found.add(pattern)
            continue
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            raise NameNotFound(
                "no quantity has this name",
                field=pattern,
                hint=f"Nearest: {', '.join(near)}." if near else "`cutaway show --taps` lists them all.",
            )
        found.update(hits)
    return [name for name in names if name in found]
