"""Every intermediate quantity of a model, by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from cutaway.errors import NameNotFound
from cutaway.spec.attention import AttentionSpec
from cutaway.spec.block import BranchSpec
from cutaway.spec.mlp import MlpSpec, MoeSpec
from cutaway.spec.model import ModelSpec

STREAM = ("batch", "query", "d_model")
SPREAD = ("batch", "query", "1")


def tap_names(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Name → axis words, in the order of the computation."""
    names: dict[str, tuple[str, ...]] = {"embed.tokens": STREAM}
    if spec.embedding.positions is not None:
        names["embed.positions"] = STREAM
    if spec.embedding.norm is not None:
        names["embed.norm_scale"] = SPREAD
    names["embed.out"] = STREAM
    for i, layer in enumerate(spec.decoder.layers):
        at = f"decoder.layers.{i}"
        names[f"{at}.resid_in"] = STREAM
        for branch in layer.branches:
            names.update({f"{at}.{branch.name}.{name}": axes for name, axes in _branch(branch).items()})
    if spec.decoder.norm is not None:
        names["decoder.norm.norm_scale"] = SPREAD
    names["decoder.norm.out"] = STREAM
    names["logits"] = ("batch", "query", "vocab")
    return names


def _branch(branch: BranchSpec) -> dict[str, tuple[str, ...]]:
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
    names: dict[str, tuple[str, ...]] = {"q": heads, "k": kv_heads, "v": kv_heads}
    if spec.rotary is not None:
        names |= {"q_rot": heads, "k_rot": kv_heads}
    pattern = ("batch", "head", "query", "key")
    out = ("batch", "query", "head", "d_model")
    return names | {"scores": pattern, "weights": pattern, "z": heads, "head_out": out}


def _mlp(spec: MlpSpec) -> dict[str, tuple[str, ...]]:
    inside: tuple[str, ...] = ("batch", "query", "d_ff")
    return {"up": inside, **({"gate": inside} if spec.gated else {}), "act": inside}


def axis_sizes(spec: ModelSpec, name: str) -> dict[str, int]:
    """The size of each axis word that the model fixes, where ``name`` is computed."""
    sizes = {"d_model": spec.d_model, "vocab": spec.vocab_size, "1": 1}
    parts = name.split(".")
    if parts[0] == "decoder" and parts[1] == "layers" and len(parts) == 5:
        branch = next(b for b in spec.decoder.layers[int(parts[2])].branches if b.name == parts[3])
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
