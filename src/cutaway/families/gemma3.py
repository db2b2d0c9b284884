"""Gemma 3, text (Gemma Team 2025): a norm on both sides of each branch, local layers between global ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    first_norm,
    llama_rules,
    parts,
    read_sizes,
    read_windows,
    write_sizes,
    write_windows,
)
from cutaway.families.family import Family, GgufForm
from cutaway.families.rope import read_rotary_section, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Offset, WeightRule
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    MaskRule,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RotarySpec,
    StackSpec,
)

KINDS = ("full_attention", "sliding_attention")


def _rotaries(c: ConfigReader, d_head: int, max_positions: int) -> tuple[RotarySpec, RotarySpec]:
    """Global and local rotary positions: nested by layer type, or the older flat keys."""
    nested = c.section("rope_parameters")
    theta = c.number("rope_theta", 1_000_000.0, above=0)
    local = c.number("rope_local_base_freq", 10_000.0, above=0)
    if nested is None:
        nested = ConfigReader({}, at="/rope_parameters")
    old = c.section("rope_scaling") or nested.section(KINDS[0]) or ConfigReader({})
    near = nested.section(KINDS[1]) or ConfigReader({})
    return (
        read_rotary_section(old, d_head, max_positions, base=theta),
        read_rotary_section(near, d_head, max_positions, base=local),
    )


def read(c: ConfigReader) -> ModelSpec:
    """A ``Gemma3TextConfig`` as a spec."""
    n = read_sizes(c, max_positions=131_072, d_head=256, n_kv_heads=4)
    # The same number under either name; transformers saves the second beside layer_types.
    every = c.integer("sliding_window_pattern", c.integer("_sliding_window_pattern", 6))
    c.keep("sliding_window_pattern", "_sliding_window_pattern")
    pattern = [KINDS[0] if (i + 1) % every == 0 else KINDS[1] for i in range(n.n_layers)]
    window = c.integer("sliding_window", 4096, high=1 << 40)
    windows = read_windows(c, n.n_layers, window, pattern)
    if not any(windows):
        c.keep("sliding_window")
    far, near = _rotaries(c, n.d_head, n.max_positions)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6, above=0), offset=1.0, cast="after")
    mlp = MlpSpec(n.d_ff, c.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"), gated=True)
    bias = c.flag("attention_bias", False)
    scale = c.number("query_pre_attn_scalar", 256, above=0) ** -0.5
    c.keep("query_pre_attn_scalar")
    dropout = c.number("attention_dropout", 0.0, low=0, high=1)
    cap = c.number("attn_logit_softcapping", None, above=0)

    def block(window: int | None) -> BlockSpec:
        attention = AttentionSpec(
            n.n_heads,
            n.n_kv_heads,
            n.d_head,
            mask=MaskRule(window=window),
            rotary=far if window is None else near,
            qk_norm=norm,
            scale=scale,
            soft_cap=cap,
            qkv_bias=bias,
            out_bias=bias,
            dropout=dropout,
        )
        return BlockSpec(
            (
                BranchSpec("attn", attention, pre_norm=norm, out_norm=norm),
                BranchSpec("mlp", mlp, pre_norm=norm, out_norm=norm),
            )
        )

    return ModelSpec(
        family="gemma3_text",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(scale=n.d_model**0.5, round_scale=True),
        decoder=StackSpec(tuple(block(window) for window in windows), norm),
        head=HeadSpec(c.flag("tie_word_embeddings", True), soft_cap=c.number("final_logit_softcapping", None, above=0)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = parts(spec.decoder.layers[0])
    ropes: dict[str, Any] = {}
    for layer in spec.decoder.layers:
        rotary = layer.attention.rotary
        assert rotary is not None
        ropes[KINDS[0] if layer.attention.mask.window is None else KINDS[1]] = write_rotary(rotary)
    return {
        **write_sizes(spec),
        **write_windows(spec),
        "attention_bias": attention.qkv_bias,
        "hidden_activation": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": first_norm(spec).eps,
        "rope_parameters": ropes,
        "query_pre_attn_scalar": round(attention.score_scale**-2),
        "attn_logit_softcapping": attention.soft_cap,
        "final_logit_softcapping": spec.lm.soft_cap,
    }


NORMS = {
    "attn.pre_norm": "input_layernorm",
    "attn.out_norm": "post_attention_layernorm",
    "mlp.pre_norm": "pre_feedforward_layernorm",
    "mlp.out_norm": "post_feedforward_layernorm",
}


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Llama's names, and four norms a layer."""
    return llama_rules(spec, NORMS)


GGUF_NORMS = {
    "attn.pre_norm": "attn_norm",
    "attn.out_norm": "post_attention_norm",
    "mlp.pre_norm": "ffn_norm",
    "mlp.out_norm": "post_ffw_norm",
    "attn.body.q_norm": "attn_q_norm",
    "attn.body.k_norm": "attn_k_norm",
}


def gguf_norms(spec: ModelSpec) -> list[WeightRule]:
    """GGUF stores every norm's weight as it multiplies: plus one."""
    layers: list[WeightRule] = [
        Offset((f"decoder.layers.{i}.branches.{ours}.weight",), (f"blk.{i}.{theirs}.weight",), 1.0)
        for i in range(spec.n_layers)
        for ours, theirs in GGUF_NORMS.items()
    ]
    return [*layers, Offset(("decoder.norm.weight",), ("output_norm.weight",), 1.0)]


def gguf_config(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """What a Gemma 3 GGUF leaves out: local base 10,000, and the 27B model's score scale of d_model / n_heads."""
    theta = config.pop("rope_theta", 1_000_000.0)
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["rope_parameters"] = {
        KINDS[0]: {"rope_theta": theta, **scaling},
        KINDS[1]: {"rope_theta": config.pop("rope_local_base_freq", 10_000.0), "rope_type": "default"},
    }
    width = config.get("head_dim", 256)
    is_27b = config.get("num_hidden_layers") == 62
    config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if is_27b else width


def gguf_words(config: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`gguf_config`, without what llama.cpp would pass over or stop at."""
    ropes, kinds = config["rope_parameters"], config["layer_types"]
    near = ropes.get(KINDS[1])
    if near is None:
        raise ConfigError("llama.cpp wants a local layer", field="/layer_types", expected=KINDS[1], got=kinds[:8])
    if near["rope_type"] != "default":
        raise ConfigError("GGUF scales global layers alone", field="/rope_parameters/sliding_attention", got=near)
    if config["attn_logit_softcapping"] is not None:
        got = config["attn_logit_softcapping"]
        raise ConfigError("llama.cpp does not cap scores here", field="/attn_logit_softcapping", got=got)
    return {
        **config,
        "rope_parameters": ropes.get(KINDS[0], {}),
        "rope_local_base_freq": near["rope_theta"],
        "sliding_window_pattern": [*kinds, KINDS[0]].index(KINDS[0]) + 1,
    }


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    read,
    write,
    rules,
    gguf=GgufForm(
        "gemma3",
        keys={
            "rope.freq_base_swa": "rope_local_base_freq",
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        complete=gguf_config,
        alter=gguf_norms,
        express=gguf_words,
    ),
)
