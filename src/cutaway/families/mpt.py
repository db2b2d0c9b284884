"""MPT (MosaicML 2023): ALiBi, no biases anywhere, projections perhaps clipped."""

from __future__ import annotations

import math
from typing import Any

from cutaway.families.common import (
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_ROWS,
    first_norm,
    head_width,
    layer_rules,
    parts,
    pre_norm_block,
)
from cutaway.families.family import Family
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Fuse, Tie, WeightRule, rename
from cutaway.spec import AlibiBias, AttentionSpec, EmbeddingSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec, StackSpec

# Which code computes it, how training began, a table that ALiBi makes needless, and two dropouts that the reference
# has no use for: it takes the attention's for everything.
INERT = ("emb_pdrop", "init_config", "init_device", "learned_pos_emb", "norm_type", "resid_pdrop", "tokenizer_name")
LAYER_NORMS = ("low_precision_layernorm", "layernorm")
BY_WIDTH = "inv_sqrt_d_model"


def read(c: ConfigReader) -> ModelSpec:
    """An ``MptConfig`` as a spec."""
    c.raw("model_type", None)
    d_model, n_heads = c.integer("d_model"), c.integer("n_heads")
    inner = c.section("attn_config") or ConfigReader({})
    attention = _attention(inner, n_heads, head_width(c, "n_heads", d_model, n_heads))
    mlp = MlpSpec(c.integer("expansion_ratio", 4) * d_model, "gelu")
    norm = NormSpec("layer", c.number("layer_norm_epsilon", 1e-5, above=0))
    block = pre_norm_block(attention, mlp, norm, dropout=attention.dropout)
    by_width = c.raw("logit_scale", None) == BY_WIDTH
    logit_scale = 1 / math.sqrt(d_model) if by_width else c.number("logit_scale", 1.0)
    if by_width:
        c.keep("logit_scale")
    c.fixed("no_bias", (True,), True)
    c.fixed("embedding_fraction", (1.0,), 1.0)  # of the gradient that the table gets
    c.fixed("norm_type", LAYER_NORMS, LAYER_NORMS[0])
    c.keep(*INERT, "verbose")
    return ModelSpec(
        family="mpt",
        vocab_size=c.size("vocab_size", high=MOST_ROWS),
        d_model=d_model,
        max_positions=c.integer("max_seq_len", 2048, high=MOST_POSITIONS),
        embedding=EmbeddingSpec(),
        decoder=StackSpec((block,) * c.size("n_layers", high=MOST_LAYERS), norm),
        head=HeadSpec(c.flag("tie_word_embeddings", True), scale=logit_scale),
        kept=tuple(sorted([*((f"attn_config/{key}", text) for key, text in inner.finish()), *c.finish()])),
    )


def _attention(c: ConfigReader, n_heads: int, d_head: int) -> AttentionSpec:
    """The nested ``attn_config``."""
    c.fixed("attn_type", ("multihead_attention",), "multihead_attention")
    c.fixed("alibi", (True,), True)  # the reference has no other positions, whatever is said here
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        c.fixed(key, (False,), False)
    c.raw("model_type", None)
    c.keep("attn_impl", "model_type")
    return AttentionSpec(
        n_heads,
        n_heads,
        d_head,
        bias=AlibiBias("interleave", max_bias=float(c.integer("alibi_bias_max", 8))),
        clip=c.number("clip_qkv", None, low=0) or None,
        scale=c.number("softmax_scale", None),
        dropout=c.number("attn_pdrop", 0, low=0, high=1),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = parts(spec.decoder.layers[0])
    assert isinstance(attention.bias, AlibiBias)
    return {
        "vocab_size": spec.vocab_size,
        "d_model": spec.d_model,
        "n_layers": spec.n_layers,
        "n_heads": attention.n_heads,
        "expansion_ratio": mlp.d_ff // spec.d_model,
        "max_seq_len": spec.max_positions,
        "layer_norm_epsilon": first_norm(spec).eps,
        "logit_scale": None if spec.lm.scale == 1.0 else spec.lm.scale,
        "no_bias": True,
        "embedding_fraction": 1.0,
        "tie_word_embeddings": spec.lm.tied,
        "attn_config": {
            "attn_type": "multihead_attention",
            "alibi": True,
            "alibi_bias_max": int(attention.bias.max_bias),
            "clip_qkv": attention.clip,
            "softmax_scale": attention.scale,
            # The reference takes whole numbers only.
            "attn_pdrop": int(attention.dropout) if attention.dropout == int(attention.dropout) else attention.dropout,
            "prefix_lm": False,
            "qk_ln": False,
            "attn_uses_sequence_id": False,
        },
    }


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Queries, keys and values in one matrix, one after the other."""
    names = {
        "attn.pre_norm": "norm_1",
        "attn.body.out": "attn.out_proj",
        "mlp.pre_norm": "norm_2",
        "mlp.body.up": "ffn.up_proj",
        "mlp.body.down": "ffn.down_proj",
    }
    out: list[WeightRule] = [rename("embed.tokens", "transformer.wte.weight")]
    for i, layer in enumerate(spec.decoder.layers):
        at = f"transformer.blocks.{i}"
        out += layer_rules(layer, i, at, names)
        qkv = tuple(f"decoder.layers.{i}.branches.attn.body.{name}.weight" for name in "qkv")
        out.append(Fuse(qkv, (f"{at}.attn.Wqkv.weight",), (spec.d_model,) * 3))
    out.append(rename("decoder.norm.weight", "transformer.norm_f.weight"))
    if spec.lm.tied:
        return [*out, Tie(("lm_head.weight",), same_as="embed.tokens")]
    return [*out, rename("head.weight", "lm_head.weight")]


FAMILY = Family("mpt", "MptForCausalLM", read, write, rules, base_prefix="transformer.")
