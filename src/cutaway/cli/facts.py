"""What can be said about a model in a few lines, from its spec alone."""

from __future__ import annotations

from typing import Any

from cutaway.checkpoints.sentence import read_sentence
from cutaway.cli.anatomy import Source
from cutaway.cli.text import Look, counted, nbytes, rounded, visible
from cutaway.cli.tree import ranges
from cutaway.spec import (
    AlibiBias,
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    BucketBias,
    ClassifierSpec,
    EmbeddingSpec,
    HeadSpec,
    LearnedPositions,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PoolerSpec,
    SinusoidalPositions,
    StackSpec,
    TransformSpec,
)
from cutaway.spec.sentence import SentenceSettings

__all__ = ["as_dict", "cache_bytes", "describe"]

_LABELS = 6  # of a classifier that are named


def describe(source: Source, look: Look) -> list[str]:
    """The lines above the tree."""
    path = source.resolved.path
    title = look.paint(path.name or str(path), "bold")
    count = sum(part.numel for part in source.parts)
    size = sum(part.nbytes for part in source.parts)
    lead = [f"{rounded(count)} parameters in {nbytes(size)}"]
    spec = source.spec
    if spec is None:
        return [title, look.paint(source.problem, "yellow"), f" {look.dot} ".join(lead)]
    plain = [*spec.stacks] == ["decoder"]
    counts = [counted(len(stack.layers), "layer" if plain else f"{name} layer") for name, stack in spec.stacks.items()]
    lead.append(" + ".join(counts))
    lead += [f"d_model {spec.d_model:,}", f"vocabulary {spec.vocab_size:,}"]
    lead += [f"context {spec.max_positions:,}"]
    lines = [f"{title}  {look.paint(spec.family, 'cyan')}", *_folded(lead, look), ""]
    for name, stack in spec.stacks.items():
        lines += _stack(stack, f"{name} " if len(spec.stacks) > 1 else "", look)
    if len(spec.stacks) > 1:
        lines.append(look.paint("before and after the layers", "dim"))
    if spec.source is not None:
        own = spec.source_vocab_size
        tokens = "the same tokens" if own is None else f"{own:,} tokens of its own"
        lines += _wrapped("source", [tokens, *_embedding(spec.source)], look)
    lines += _wrapped("embed", _embedding(spec.embedding), look)
    lines += _wrapped("head", _head(spec, look), look)
    if path.is_dir() and (sentence := read_sentence(path)) is not None:
        lines += _wrapped("vector", _sentence(sentence), look)
    memory = [f"{nbytes(4 * count)} in fp32", f"{nbytes(2 * count)} in bf16"]
    if spec.decoder.layers:
        memory.append(f"and {nbytes(cache_bytes(spec))} of cache a token in fp32")
    if spec.source is not None:
        memory.append(f"{nbytes(source_bytes(spec))} a token of the source")
    return [*lines, *_wrapped("memory", memory, look)]


def _stack(stack: StackSpec, name: str, look: Look) -> list[str]:
    """Each kind of layer, and which layers are of it."""
    lines: list[str] = []
    kinds: dict[BlockSpec, list[int]] = {}
    for i, layer in enumerate(stack.layers):
        kinds.setdefault(layer, []).append(i)
    for layer, where in kinds.items():
        if len(kinds) > 1 or name:
            heading = f"{name}layer{'s' if len(where) > 1 else ''} {ranges(where)}"
            lines.append(look.paint(heading.replace("–", "-") if look.plain else heading, "dim"))
        for branch in layer.branches:
            lines += _wrapped(branch.name, _branch(branch), look)
        if layer.parallel:
            through = ", through the first one's norm" if layer.shared_norm else ""
            lines.append(f"  the branches read the same input, side by side{through}")
    return lines


def _sentence(settings: SentenceSettings) -> list[str]:
    """How `embed` makes one vector of a text."""
    pools = {"mean": "the mean of the vectors", "max": "the largest of each channel"}
    facts = [pools.get(settings.pool, f"the {'first' if settings.pool == 'cls' else 'last'} token's vector")]
    facts += ["brought to length one"] if settings.normalize else []
    facts += [f"of at most {settings.max_length:,} tokens"] if settings.max_length is not None else []
    return facts


def _wrapped(word: str, facts: list[str], look: Look) -> list[str]:
    """Facts after a word, on as many lines as they need."""
    lines, line = [], ""
    for fact in facts:
        more = f"{line}, {fact}" if line else fact
        if line and len(more) > look.width - 10:
            lines.append(line + ",")
            line = fact
        else:
            line = more
    return [
        look.paint(f"  {word if i == 0 else '':<6}", "cyan") + "  " + text
        for i, text in enumerate([*lines, line])
        if text
    ]


def _folded(facts: list[str], look: Look) -> list[str]:
    """Facts with dots between them, on as many lines as they need."""
    lines = [facts[0]]
    for fact in facts[1:]:
        if len(lines[-1]) + 3 + len(fact) <= look.width:
            lines[-1] += f" {look.dot} {fact}"
        else:
            lines.append(fact)
    return lines


def _branch(branch: BranchSpec) -> list[str]:
    body = branch.body
    match body:
        case AttentionSpec():
            facts = _attention(body)
        case MlpSpec():
            facts = _mlp(body)
        case MoeSpec():
            facts = [f"{body.n_experts} experts, {body.top_k} for each token", *_mlp(body.expert)]
    for where, norm in (("before", branch.pre_norm), ("on its output", branch.out_norm), ("after", branch.post_norm)):
        if norm is not None:
            facts.append(f"{_norm(norm)} {where}")
    if branch.scale != 1:
        facts.append(f"times {branch.scale:g}")
    return facts


def _attention(spec: AttentionSpec) -> list[str]:
    facts = [f"{counted(spec.n_heads, 'head')} of {spec.d_head}"]
    if spec.n_kv_heads != spec.n_heads:
        facts[0] += f" on {spec.n_kv_heads} key/value head{'s' if spec.n_kv_heads != 1 else ''}"
    facts.append("on the encoder's output" if spec.cross else "causal" if spec.mask.causal else "both ways")
    if spec.mask.window is not None:
        facts.append(f"window {spec.mask.window:,}")
    if spec.mask.chunk is not None:
        facts.append(f"chunks of {spec.mask.chunk:,}")
    if spec.mask.prefix:
        facts.append("a prefix both ways")
    match spec.bias:
        case AlibiBias():
            facts.append("ALiBi")
        case BucketBias():
            facts.append(f"{spec.bias.n_buckets} relative buckets")
    if spec.relative is not None:
        facts.append(f"relative vectors up to {spec.relative.max_distance:,}")
    if spec.clip is not None:
        facts.append(f"clipped at {spec.clip:g}")
    if spec.rotary is not None:
        turned = "" if spec.rotary.d_rotary == spec.d_head else f" on {spec.rotary.d_rotary} channels"
        pairs = ", neighbours paired" if spec.rotary.interleaved else ""
        facts.append(f"rotary base {spec.rotary.base:,.0f}{turned}{pairs}")
        if spec.rotary.scaling is not None:
            facts.append(type(spec.rotary.scaling).__name__.removesuffix("Scaling").lower() + " scaling")
    if spec.qk_norm is not None:
        over = " whole" if spec.qk_norm_over == "width" else ""
        facts.append(f"q and k normed{over}{' after turning' if spec.qk_norm_after else ''}")
    if spec.scale is not None and spec.scale != spec.d_head**-0.5:
        facts.append(f"scores times {spec.scale:g}")
    if spec.soft_cap is not None:
        facts.append(f"scores capped at {spec.soft_cap:g}")
    if spec.qkv_bias or spec.out_bias:
        facts.append("biases")
    return facts


def _mlp(spec: MlpSpec) -> list[str]:
    biases = ["biases"] if spec.bias or spec.out_bias else []
    return [f"{'gated ' if spec.gated else ''}{spec.activation}", f"d_ff {spec.d_ff:,}", *biases]


def _norm(spec: NormSpec) -> str:
    return f"{'RMS' if spec.kind == 'rms' else 'layer'} norm"


def _embedding(spec: EmbeddingSpec) -> list[str]:
    table = spec.positions
    facts = [] if spec.scale == 1 else [f"times {spec.scale:g}"]
    match table:
        case LearnedPositions():
            facts.append(f"{table.limit:,} learned positions")
        case SinusoidalPositions():
            facts.append("sinusoidal positions")
    if spec.types:
        facts.append(f"{counted(spec.types, 'token type')}")
    return facts if spec.norm is None else [*facts, _norm(spec.norm)]


def _head(spec: ModelSpec, look: Look) -> list[str]:
    match spec.head:
        case HeadSpec() as head:
            facts = _transform(head.transform)
            facts.append("the embedding table again" if head.tied else "a matrix of its own")
            if head.bias:
                facts.append("a bias")
            if head.scale != 1:
                facts.append(f"times {head.scale:g}")
            if head.soft_cap is not None:
                facts.append(f"capped at {head.soft_cap:g}")
            return facts
        case PoolerSpec() as pooler:
            return _pooler(pooler)
        case ClassifierSpec() as classifier:
            of = _pooler(classifier.pooler) if classifier.pooler is not None else ["for each token"]
            kind = {"single": "label", "multi": "independent label", "regression": "number"}[classifier.kind]
            first, *others = [visible(label, look) for label in classifier.labels[:_LABELS]]
            more = len(classifier.labels) - _LABELS
            named = [f"{counted(len(classifier.labels), kind)}: {first}", *others]
            return [*of, *named, *([f"and {more:,} more"] if more > 0 else [])]
        case _:
            return ["none: the stream itself"]


def _pooler(spec: PoolerSpec) -> list[str]:
    whose = "the mean of the vectors" if spec.pool == "mean" else f"the {spec.pool} token's vector"
    return [whose, *_transform(spec.transform)]


def _transform(spec: TransformSpec | None) -> list[str]:
    if spec is None:
        return []
    return [f"a matrix and {spec.activation}", *([] if spec.norm is None else [_norm(spec.norm)])]


def cache_bytes(spec: ModelSpec, itemsize: int = 4) -> int:
    """What one more token costs in the cache, while no window is full."""
    layers = (layer.attention for layer in spec.decoder.layers)
    return sum(2 * a.n_kv_heads * a.d_head * itemsize for a in layers)


def source_bytes(spec: ModelSpec, itemsize: int = 4) -> int:
    """What a token of an encoder–decoder's source costs in the cache."""
    bodies = (layer.cross for layer in spec.decoder.layers)
    return sum(2 * a.n_kv_heads * a.d_head * itemsize for a in bodies if a is not None)


def as_dict(source: Source) -> dict[str, Any]:
    """A model for --json."""
    spec = source.spec
    known: dict[str, Any] = {"family": None}
    if spec is not None:
        known = {
            "family": spec.family,
            "n_layers": spec.n_layers,
            "d_model": spec.d_model,
            "vocab_size": spec.vocab_size,
            "max_positions": spec.max_positions,
            "tied": isinstance(spec.head, HeadSpec) and spec.head.tied,
            "stacks": {name: len(stack.layers) for name, stack in spec.stacks.items()},
            **_labels(spec),
            "cache_bytes_per_token_fp32": cache_bytes(spec),
            **({} if spec.source is None else {"cache_bytes_per_source_token_fp32": source_bytes(spec)}),
        }
    tensors = [
        {"name": p.name, "stored": p.stored, "shape": list(p.shape), "type": p.type, "bytes": p.nbytes}
        for p in source.parts
    ]
    return {
        "path": str(source.resolved.path),
        "origin": source.resolved.origin,
        **known,
        "parameters": sum(part.numel for part in source.parts),
        "bytes": sum(part.nbytes for part in source.parts),
        "tensors": tensors,
        "not_used": source.left,
        "missing": source.missing,
    }


def _labels(spec: ModelSpec) -> dict[str, Any]:
    if not isinstance(spec.head, ClassifierSpec):
        return {}
    return {"labels": list(spec.head.labels), "label_kind": spec.head.kind}
