"""Mistral (Jiang et al. 2023): Llama with a sliding window on every layer."""

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
from cutaway.spec import AttentionSpec, EmbeddingSpec, HeadSpec, MaskRule, MlpSpec, ModelSpec, NormSpec, StackSpec


def read(c: ConfigReader) -> ModelSpec:
    """A ``MistralConfig`` as a spec. Left out, the window is 4,096; null, there is none."""
    n = read_sizes(c, max_positions=4096 * 32, n_kv_heads=8)
    window = None if c.raw("sliding_window", 4096) is None else c.integer("sliding_window", 4096, high=1 << 40)
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        mask=MaskRule(window=window),
        rotary=read_rotary(c, n.d_head, n.max_positions),
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6, above=0))
    return ModelSpec(
        family="mistral",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(),
        decoder=StackSpec((pre_norm_block(attention, mlp, norm),) * n.n_layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = parts(spec.decoder.layers[0])
    assert attention.rotary is not None
    return {
        **write_sizes(spec),
        "sliding_window": attention.mask.window,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": first_norm(spec).eps,
        "rope_parameters": write_rotary(attention.rotary),
    }


FAMILY = Family("mistral", "MistralForCausalLM", read, write, llama_rules)
