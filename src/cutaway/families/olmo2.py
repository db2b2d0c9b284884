"""OLMo 2 (Team OLMo 2024): norms on what a branch adds, none before it; queries and keys normed over all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutaway.families.common import ACTIVATION_NAMES, ACTIVATIONS, llama_rules, parts, read_sizes, write_sizes
from cutaway.families.family import Family
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import WeightRule
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    StackSpec,
)


def read(c: ConfigReader) -> ModelSpec:
    """An ``Olmo2Config`` as a spec."""
    n = read_sizes(c)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-5, above=0), cast="after")
    bias = c.flag("attention_bias", False)
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        rotary=replace(read_rotary(c, n.d_head, n.max_positions), cast="after"),
        qk_norm=norm,
        qk_norm_over="width",
        qkv_bias=bias,
        out_bias=bias,
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True)
    block = BlockSpec((BranchSpec("attn", attention, out_norm=norm), BranchSpec("mlp", mlp, out_norm=norm)))
    return ModelSpec(
        family="olmo2",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(),
        decoder=StackSpec((block,) * n.n_layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = parts(spec.decoder.layers[0])
    assert attention.rotary is not None
    assert attention.qk_norm is not None
    return {
        **write_sizes(spec),
        "attention_bias": attention.qkv_bias,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": attention.qk_norm.eps,
        "rope_parameters": write_rotary(attention.rotary),
    }


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Llama's names, and a norm after each branch."""
    names = {"attn.out_norm": "post_attention_layernorm", "mlp.out_norm": "post_feedforward_layernorm"}
    return llama_rules(spec, names)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", read, write, rules)
