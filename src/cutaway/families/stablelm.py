"""StableLM (Bellagente et al. 2024): LayerNorm, a partial rotation, branches after one another or side by side."""

from __future__ import annotations

import math
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
from cutaway.families.rope import read_rotary_section, write_rotary
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
    RotarySpec,
    StackSpec,
)

FACTOR = "partial_rotary_factor"


def _rotary(c: ConfigReader, d_head: int, max_positions: int) -> RotarySpec:
    """Rotary positions, whose width is a share of the head: stated in the section, or flat beside it."""

    def read_part(section: ConfigReader, share: float) -> int:
        stated = section.number(FACTOR, share, above=0, high=1)
        width = int(d_head * stated)
        if width < 2 or width % 2:
            expected = f"an even number of the head's {d_head} channels"
            raise section.error(FACTOR, "rotary positions need an even width", expected=expected, got=stated)
        return width

    base, share = c.number("rope_theta", 10_000.0, above=0), c.number(FACTOR, 0.25, above=0, high=1)
    found: list[RotarySpec] = []
    for key in ("rope_parameters", "rope_scaling"):
        section = c.section(key)
        if section is not None:
            found.append(read_rotary_section(section, read_part(section, share), max_positions, base=base))
    if not found:
        return RotarySpec(base, read_part(c, share))
    spec = found[0]
    if spec != found[-1]:
        raise c.error("rope_scaling", "differs from rope_parameters")
    if c.has("rope_theta") and spec.base != base:
        raise c.error("rope_theta", "differs from rope_parameters/rope_theta", expected=spec.base, got=base)
    if c.has(FACTOR) and spec.d_rotary != int(d_head * share):
        raise c.error(FACTOR, f"differs from rope_parameters/{FACTOR}", expected=spec.d_rotary / d_head, got=share)
    return spec


def _write_rotary(spec: RotarySpec, d_head: int) -> dict[str, Any]:
    share = spec.d_rotary / d_head
    if int(d_head * share) < spec.d_rotary:  # rounded down: 44 · (30 / 44) is less than 30
        share = math.nextafter(share, 1.0)
    return {**write_rotary(spec), FACTOR: share}


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
        rotary=_rotary(c, n.d_head, n.max_positions),
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
        "rope_parameters": _write_rotary(attention.rotary, attention.d_head),
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
