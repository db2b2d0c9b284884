"""Llama (Touvron et al. 2023; Grattafiori et al. 2024), and SmolLM2 with it."""

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
from cutaway.families.family import Family, GgufForm
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Interleave, WeightRule
from cutaway.spec import AttentionSpec, EmbeddingSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec, StackSpec


def read(c: ConfigReader) -> ModelSpec:
    """A ``LlamaConfig`` as a spec."""
    n = read_sizes(c)
    bias = c.flag("attention_bias", False)
    mlp_bias = c.flag("mlp_bias", False)
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        rotary=read_rotary(c, n.d_head, n.max_positions),
        qkv_bias=bias,
        out_bias=bias,
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True, bias=mlp_bias, out_bias=mlp_bias)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6, above=0))
    tied = c.flag("tie_word_embeddings", False)
    return ModelSpec(
        family="llama",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(),
        decoder=StackSpec((pre_norm_block(attention, mlp, norm),) * n.n_layers, norm),
        head=HeadSpec(tied),
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
    }


def gguf_rows(spec: ModelSpec) -> list[WeightRule]:
    """GGUF stores the rows of Llama's q and k with rotary pairs side by side."""
    attention, _ = parts(spec.decoder.layers[0])
    heads = {"q": attention.n_heads, "k": attention.n_kv_heads}
    return [
        Interleave((f"decoder.layers.{i}.branches.attn.body.{name}.{kind}",), (f"blk.{i}.attn_{name}.{kind}",), n)
        for i in range(spec.n_layers)
        for name, n in heads.items()
        for kind in (("weight", "bias") if attention.qkv_bias else ("weight",))
    ]


GGUF = GgufForm("llama", alter=gguf_rows, factors=True)

FAMILY = Family("llama", "LlamaForCausalLM", read, write, llama_rules, gguf=GGUF)
