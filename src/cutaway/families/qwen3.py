"""Qwen3 (Yang et al. 2025): a norm on each head's query and key, and a free head width."""

from __future__ import annotations

from typing import Any

from cutaway.families import qwen2
from cutaway.families.common import (
    ACTIVATIONS,
    llama_rules,
    parts,
    pre_norm_block,
    read_sizes,
)
from cutaway.families.family import Family, GgufForm
from cutaway.families.rope import read_rotary
from cutaway.formats.config import ConfigReader
from cutaway.spec import AttentionSpec, EmbeddingSpec, HeadSpec, MaskRule, MlpSpec, ModelSpec, NormSpec, StackSpec


def read(c: ConfigReader) -> ModelSpec:
    """A ``Qwen3Config`` as a spec."""
    n = read_sizes(c, max_positions=32768, d_head=128)
    rotary = read_rotary(c, n.d_head, n.max_positions)
    dropout = c.number("attention_dropout", 0.0, low=0, high=1)
    bias = c.flag("attention_bias", False)
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6, above=0))
    layers = tuple(
        pre_norm_block(
            AttentionSpec(
                n.n_heads,
                n.n_kv_heads,
                n.d_head,
                mask=MaskRule(window=window),
                rotary=rotary,
                qk_norm=norm,
                qkv_bias=bias,
                out_bias=bias,
                dropout=dropout,
            ),
            mlp,
            norm,
        )
        for window in qwen2.windows(c, n.n_layers)
    )
    return ModelSpec(
        family="qwen3",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(),
        decoder=StackSpec(layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    return {**qwen2.write(spec), "attention_bias": parts(spec.decoder.layers[0])[0].qkv_bias}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, write, llama_rules, gguf=GgufForm("qwen3"))
