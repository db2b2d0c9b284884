"""StableLM (Bellagente et al. 2024): LayerNorm, a partial rotation, branches after one another or side by side."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    NORM_NAMES,
    first_norm,
    llama_rules,
    parts,
    read_sizes,
    write_sizes,
)
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
    """A ``StableLmConfig`` as a spec. Side by side, both branches read through one norm."""
    n = read_sizes(c, max_positions=4096, n_kv_heads=32)
    if n.n_heads * n.d_head != n.d_model:
        expected = f"{n.d_model} / {n.n_heads}"
        raise c.error("head_dim", "the heads together must be as wide as the stream", expected=expected, got=n.d_head)
    c.fixed("qk_layernorm", (False,), False)  # a norm of its own for every head
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        rotary=read_rotary(c, n.d_head, n.max_positions, share=0.25),
        qkv_bias=c.flag("use_qkv_bias", False),
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5, above=0), bias=True)
    parallel = c.flag("use_parallel_residual", False)
    dropout = c.number("hidden_dropout", 0.0, low=0, high=1)  # of the feed-forward's branch alone
    branches = (
        BranchSpec("attn", attention, pre_norm=norm),
        BranchSpec("mlp", mlp, pre_norm=None if parallel else norm, dropout=dropout),
    )
    block = BlockSpec(branches, parallel=parallel, shared_norm=parallel)
    return ModelSpec(
        family="stablelm",
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
    block = spec.decoder.layers[0]
    attention, mlp = parts(block)
    assert attention.rotary is not None
    return {
        **write_sizes(spec),
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "layer_norm_eps": first_norm(spec).eps,
        "rope_parameters": write_rotary(attention.rotary, attention.d_head),
        "use_qkv_bias": attention.qkv_bias,
        "qk_layernorm": False,
        "use_parallel_residual": block.parallel,
        "hidden_dropout": block.branches[1].dropout,
    }


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Llama's names; without the second norm where the branches share the first."""
    shared = spec.decoder.layers[0].shared_norm
    return llama_rules(spec, {"attn.pre_norm": "input_layernorm"} if shared else NORM_NAMES)


FAMILY = Family("stablelm", "StableLmForCausalLM", read, write, rules)
