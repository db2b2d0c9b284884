"""Granite 3 (IBM 2024): Llama with four constants on embedding, scores, branches and logits."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    first_norm,
    llama_rules,
    parts,
    pre_norm_block,
    read_sizes,
    write_sizes,
)
from cutaway.families.family import Family
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.spec import AttentionSpec, EmbeddingSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec, StackSpec


def read(c: ConfigReader) -> ModelSpec:
    """A ``GraniteConfig`` as a spec. It divides the logits; the spec multiplies them."""
    n = read_sizes(c)
    bias = c.flag("attention_bias", False)
    mlp_bias = c.flag("mlp_bias", False)
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        rotary=read_rotary(c, n.d_head, n.max_positions),
        scale=c.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        out_bias=bias,
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True, bias=mlp_bias, out_bias=mlp_bias)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6, above=0))
    block = pre_norm_block(attention, mlp, norm, scale=c.number("residual_multiplier", 1.0))
    divisor = c.number("logits_scaling", 1.0, above=0)
    c.keep("logits_scaling")
    return ModelSpec(
        family="granite",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(scale=c.number("embedding_multiplier", 1.0)),
        decoder=StackSpec((block,) * n.n_layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False), scale=1.0 / divisor),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = parts(spec.decoder.layers[0])
    assert attention.rotary is not None
    return {
        **write_sizes(spec),
        "attention_bias": attention.qkv_bias,
        "mlp_bias": mlp.bias,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": first_norm(spec).eps,
        "rope_parameters": write_rotary(attention.rotary),
        "attention_multiplier": attention.score_scale,
        "residual_multiplier": spec.decoder.layers[0].branches[0].scale,
        "embedding_multiplier": spec.embedding.scale,
        "logits_scaling": 1.0 / spec.lm.scale,
    }


FAMILY = Family("granite", "GraniteForCausalLM", read, write, llama_rules)
