"""ModernBERT (Warner et al. 2024): an encoder of a decoder's parts, with rotary positions and mostly local layers."""

from __future__ import annotations

from typing import Any, Literal

from cutaway.families.common import ACTIVATION_NAMES, ACTIVATIONS
from cutaway.families.encoder import (
    Kind,
    classifier_rules,
    first_encoder,
    kind_of,
    lm_rules,
    norm_rules,
    read_encoder_sizes,
    read_kind,
    read_labels,
    stack_rules,
    transform_rules,
    write_labels,
)
from cutaway.families.family import Family
from cutaway.families.rope import read_rotary_section, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Fuse, WeightRule, rename
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    ClassifierSpec,
    EmbeddingSpec,
    HeadSpec,
    MaskRule,
    MlpSpec,
    ModelSpec,
    NormSpec,
    PoolerSpec,
    RotarySpec,
    StackSpec,
    TransformSpec,
)

FAR, NEAR = "full_attention", "sliding_attention"
POOLS: dict[str, Literal["first", "mean"]] = {"cls": "first", "mean": "mean"}
# How its training ran and how its code runs; and what says again what is said elsewhere.
UNREAD = """cls_token_id deterministic_flash_attn global_attn_every_n_layers initializer_cutoff_factor
    reference_compile repad_logits_with_grad sparse_pred_ignore_index sparse_prediction"""
LAYER_NAMES = {"attn.pre_norm": "attn_norm", "attn.body.out": "attn.Wo", "mlp.pre_norm": "mlp_norm"}
LAYER_NAMES["mlp.body.down"] = "mlp.Wo"


def read(c: ConfigReader) -> ModelSpec:
    """A ``ModernBertConfig`` as a spec."""
    kind = read_kind(c, "ModernBert")
    n = read_encoder_sizes(c, max_positions=8192)
    every = c.integer("global_attn_every_n_layers", 3)
    c.keep(*UNREAD.split())
    kinds = c.words("layer_types", n.n_layers, (FAR, NEAR)) or [NEAR if i % every else FAR for i in range(n.n_layers)]
    local = c.integer("local_attention", 128, high=1 << 40)
    if local % 2 or NEAR not in kinds:
        c.keep("local_attention")
    rotary = _rotaries(c, n.d_head, n.max_positions, kinds)
    norm = NormSpec("layer", c.number("norm_eps", 1e-5, above=0), bias=c.flag("norm_bias", False))
    c.fixed("layer_norm_eps", (norm.eps, None), None)
    c.keep("layer_norm_eps")
    bias, dropout = c.flag("attention_bias", False), c.number("attention_dropout", 0.0, low=0, high=1)
    wide = c.flag("mlp_bias", False)
    activation = c.choice("hidden_activation", ACTIVATIONS, "gelu")
    drop = c.number("mlp_dropout", 0.0, low=0, high=1)
    mlp = MlpSpec(n.d_ff, activation, gated=True, bias=wide, out_bias=wide, dropout=drop)

    def block(i: int, kind: str) -> BlockSpec:
        # Half the window lies on either side of a token, which itself is no part of it.
        mask = MaskRule(causal=False, window=None if kind == FAR else local // 2 + 1)
        attention = AttentionSpec(
            n.n_heads, n.n_heads, n.d_head, mask, rotary[kind], qkv_bias=bias, out_bias=bias, dropout=dropout
        )
        first = BranchSpec("attn", attention, pre_norm=norm if i else None, dropout=dropout)  # the embedding is normed
        return BlockSpec((first, BranchSpec("mlp", mlp, pre_norm=norm)))

    return ModelSpec(
        family="modernbert",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(norm=norm, dropout=c.number("embedding_dropout", 0.0, low=0, high=1)),
        decoder=StackSpec(),
        head=_head(c, kind, norm),
        encoder=StackSpec(tuple(block(i, kind) for i, kind in enumerate(kinds)), norm),
        kept=c.finish(),
    )


def _rotaries(c: ConfigReader, d_head: int, max_positions: int, kinds: list[str]) -> dict[str, RotarySpec]:
    """Each kind of layer's rotary positions, in today's spelling or the first one."""
    sections = c.section("rope_parameters")
    c.fixed("rope_scaling", (None,), None)
    if sections is not None and len(set(kinds)) < 2:
        c.keep("rope_parameters")  # one of the two is no layer's
    found: dict[str, RotarySpec] = {}
    for kind, key, base in ((FAR, "global_rope_theta", 160_000.0), (NEAR, "local_rope_theta", 10_000.0)):
        if kind == NEAR and key in c and not c.has(key):
            base = found[FAR].base  # a null says: as the global layers
        stated = c.number(key, None, above=0)
        section = (sections and sections.section(kind)) or ConfigReader({})
        found[kind] = read_rotary_section(section, d_head, max_positions, base=base if stated is None else stated)
        if stated is not None and stated != found[kind].base:
            raise c.error(key, f"differs from rope_parameters/{kind}", expected=found[kind].base, got=stated)
    return found


def _head(c: ConfigReader, kind: Kind, norm: NormSpec) -> HeadSpec | ClassifierSpec | None:
    """All heads but none at all transform a vector alike; the pooler's is that of a text."""
    activation = c.choice("classifier_activation", ACTIVATIONS, "gelu")
    transform = TransformSpec(activation, c.flag("classifier_bias", False), norm)
    head = HeadSpec(c.flag("tie_word_embeddings", True), c.flag("decoder_bias", True), transform=transform)
    pooler = PoolerSpec(c.choice("classifier_pooling", POOLS, "cls"), transform)
    dropout = c.number("classifier_dropout", 0.0, low=0, high=1)
    if kind == "Model":
        c.keep("classifier_activation", "classifier_bias")
    if kind != "ForMaskedLM":
        c.keep("tie_word_embeddings", "decoder_bias")
    if kind != "ForSequenceClassification":
        c.keep("classifier_pooling")
    if not kind.endswith("Classification"):
        c.keep("classifier_dropout")
        return head if kind == "ForMaskedLM" else None
    labels, exclusive = read_labels(c)
    if kind == "ForSequenceClassification":
        return ClassifierSpec(labels, pooler, dropout=dropout, kind=exclusive)
    return ClassifierSpec(labels, transform=transform, dropout=dropout, kind=exclusive)


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = first_encoder(spec)
    norm = spec.encoder.norm
    assert norm is not None
    layers = [layer.attention for layer in spec.encoder.layers]
    windows = [a.mask.window for a in layers if a.mask.window is not None]
    ropes = {FAR if a.mask.window is None else NEAR: write_rotary(a.rotary) for a in layers if a.rotary is not None}
    return {
        "architectures": [f"ModernBert{kind_of(spec)}"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "intermediate_size": mlp.d_ff,
        "hidden_activation": ACTIVATION_NAMES[mlp.activation],
        "max_position_embeddings": spec.max_positions,
        "norm_eps": norm.eps,
        "norm_bias": norm.bias,
        "attention_bias": attention.qkv_bias,
        "attention_dropout": attention.dropout,
        "embedding_dropout": spec.embedding.dropout,
        "mlp_bias": mlp.bias,
        "mlp_dropout": mlp.dropout,
        "layer_types": [FAR if a.mask.window is None else NEAR for a in layers],
        "rope_parameters": ropes,
        **({"local_attention": 2 * (max(windows) - 1)} if windows else {}),
        **_write_head(spec.head),
        **write_labels(spec.head),
    }


def _write_head(head: object) -> dict[str, Any]:
    transform: TransformSpec | None = None
    out: dict[str, Any] = {}
    if isinstance(head, HeadSpec):
        transform, out = head.transform, {"tie_word_embeddings": head.tied, "decoder_bias": head.bias}
    elif isinstance(head, ClassifierSpec):
        transform, out = head.transform, {"classifier_dropout": head.dropout}
        if head.pooler is not None:
            transform = head.pooler.transform
            out["classifier_pooling"] = next(theirs for theirs, ours in POOLS.items() if ours == head.pooler.pool)
    if transform is not None:
        out |= {"classifier_bias": transform.bias, "classifier_activation": ACTIVATION_NAMES[transform.activation]}
    return out


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Tensors under ModernBERT's names: q, k and v are one, and so are gate and up."""
    at = "" if spec.head is None else "model."
    found: list[WeightRule] = [rename("embed.tokens", f"{at}embeddings.tok_embeddings.weight")]
    found += norm_rules("embed.norm", spec.embedding.norm, f"{at}embeddings.norm")
    attention, mlp = first_encoder(spec)
    for i in range(spec.n_layers):
        ours, theirs = f"encoder.layers.{i}.branches", f"{at}layers.{i}"
        for part in ("weight", "bias") if attention.qkv_bias else ("weight",):
            joined = tuple(f"{ours}.attn.body.{x}.{part}" for x in "qkv")
            found.append(Fuse(joined, (f"{theirs}.attn.Wqkv.{part}",), (spec.d_model,) * 3))
        for part in ("weight", "bias") if mlp.bias else ("weight",):
            joined = tuple(f"{ours}.mlp.body.{x}.{part}" for x in ("gate", "up"))
            found.append(Fuse(joined, (f"{theirs}.mlp.Wi.{part}",), (mlp.d_ff,) * 2))
    found += stack_rules(spec, "encoder", f"{at}layers.{{i}}", LAYER_NAMES)
    found += norm_rules("encoder.norm", spec.encoder.norm, f"{at}final_norm")
    match spec.head:
        case HeadSpec() as head:
            found += transform_rules("head.transform", head.transform, "head.dense", "head.norm")
            found += lm_rules(head, "decoder.weight", "decoder.bias")
        case ClassifierSpec() as head:
            pooler = head.pooler
            ours, transform = ("head", head.transform) if pooler is None else ("head.pooler", pooler.transform)
            found += transform_rules(f"{ours}.transform", transform, "head.dense", "head.norm")
            found += classifier_rules(head, "classifier")
        case _:
            pass
    return found


FAMILY = Family("modernbert", "", read, write, rules, base_prefix="")
