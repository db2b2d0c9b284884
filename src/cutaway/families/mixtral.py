"""Mixtral (Jiang et al. 2024): Mistral with eight experts in each layer, of which a token goes to two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    first_norm,
    llama_rules,
    pre_norm_block,
    read_sizes,
    write_sizes,
)
from cutaway.families.experts import GGUF_COUNTS, expert_rules, first_experts, gguf_counts, read_counts
from cutaway.families.family import Family, GgufForm
from cutaway.families.llama import gguf_rows
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import WeightRule
from cutaway.spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    MaskRule,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    StackSpec,
)


def read(c: ConfigReader) -> ModelSpec:
    """A ``MixtralConfig`` as a spec. Left out or null, there is no window."""
    n = read_sizes(c, max_positions=4096 * 32, n_kv_heads=8)
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        mask=MaskRule(window=c.integer("sliding_window", None, high=1 << 40)),
        rotary=read_rotary(c, n.d_head, n.max_positions, base=1_000_000.0),
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    n_experts, top_k = read_counts(c, n_experts=8, top_k=2)
    moe = MoeSpec(
        n_experts,
        top_k,
        MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True),
        jitter=c.number("router_jitter_noise", 0.0, low=0, high=1),
    )
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-5, above=0))
    return ModelSpec(
        family="mixtral",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(),
        decoder=StackSpec((pre_norm_block(attention, moe, norm),) * n.n_layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, moe = spec.decoder.layers[0].attention, first_experts(spec)
    assert attention.rotary is not None
    assert moe is not None
    return {
        **write_sizes(spec),
        "sliding_window": attention.mask.window,
        "num_local_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "router_jitter_noise": moe.jitter,
        "hidden_act": ACTIVATION_NAMES[moe.expert.activation],
        "rms_norm_eps": first_norm(spec).eps,
        "rope_parameters": write_rotary(attention.rotary),
    }


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Llama's names, but for the experts."""
    return [*llama_rules(spec), *expert_rules(spec, "block_sparse_moe", gate="w1", up="w3", down="w2")]


def _complete(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    gguf_counts(config, "llama")
    config.setdefault("rope_theta", 10_000.0)  # the architecture's, not the family's


def _express(config: dict[str, Any]) -> dict[str, Any]:
    if config["sliding_window"] is not None:
        what, hint = "llama.cpp passes over the window of such a model", "format='cutaway' holds any model"
        raise ConfigError(what, field="/sliding_window", expected=None, got=config["sliding_window"], hint=hint)
    return config


GGUF = GgufForm("llama", GGUF_COUNTS, complete=_complete, alter=gguf_rows, express=_express, factors=True)

FAMILY = Family("mixtral", "MixtralForCausalLM", read, write, rules, gguf=GGUF)
