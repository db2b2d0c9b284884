"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts in some layers or all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import WeightRule
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    MaskRule,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    StackSpec,
)


def _window(c: ConfigReader) -> int | None:
    """The window of every layer: unlike Qwen3's, all of them slide, or none."""
    on = c.flag("use_sliding_window", False)
    window = None if c.raw("sliding_window", 4096) is None else c.integer("sliding_window", 4096, high=1 << 40)
    c.keep("max_window_layers")  # in every config on the hub, and without effect
    if on and c.raw("max_window_layers", 0) not in (0, None):
        what = "here every layer slides or none does"
        raise c.error("max_window_layers", what, expected="0 or null", got=c.raw("max_window_layers"))
    # Only what `write` could not tell from the layers.
    if not on and window is not None:
        c.keep("sliding_window")
    if on and window is None:
        c.keep("use_sliding_window")
    return window if on else None


def _dense(c: ConfigReader, n_layers: int) -> list[int]:
    """The layers without experts: those that are listed, and those between every ``decoder_sparse_step``-th."""
    listed, step = c.raw("mlp_only_layers", None), c.integer("decoder_sparse_step", 1)
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        raise c.error("mlp_only_layers", "not a list of layers", expected="a list of ints", got=listed)
    dense = [i for i in range(n_layers) if i in listed or (i + 1) % step]
    # `write` lists them all, at step 1.
    if step != 1:
        c.keep("decoder_sparse_step")
    if listed != dense:
        c.keep("mlp_only_layers")
    return dense


def read(c: ConfigReader) -> ModelSpec:
    """A ``Qwen3MoeConfig`` as a spec."""
    n = read_sizes(c, max_positions=32768, n_kv_heads=4)
    bias = c.flag("attention_bias", False)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6, above=0))
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        mask=MaskRule(window=_window(c)),
        rotary=read_rotary(c, n.d_head, n.max_positions),
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    act = c.choice("hidden_act", ACTIVATIONS, "silu")
    n_experts, top_k = read_counts(c, n_experts=128, top_k=8)
    expert = MlpSpec(c.integer("moe_intermediate_size", 768, high=1 << 24), act, gated=True)
    moe = MoeSpec(n_experts, top_k, expert, normalised=c.flag("norm_topk_prob", False))
    dense = _dense(c, n.n_layers)
    if not dense:
        c.keep("intermediate_size")  # no layer has it
    if len(dense) == n.n_layers:
        c.keep("moe_intermediate_size", "num_local_experts", "num_experts", "num_experts_per_tok", "norm_topk_prob")

    def block(i: int) -> BlockSpec:
        return pre_norm_block(attention, MlpSpec(n.d_ff, act, gated=True) if i in dense else moe, norm)

    return ModelSpec(
        family="qwen3_moe",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(),
        decoder=StackSpec(tuple(block(i) for i in range(n.n_layers)), norm),
        head=HeadSpec(c.flag("tie_word_embeddings", False)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, moe = spec.decoder.layers[0].attention, first_experts(spec)
    assert attention.rotary is not None
    mlps = {i: branch.body for i, layer in enumerate(spec.decoder.layers) for branch in layer.branches[1:]}
    dense = {i: mlp for i, mlp in mlps.items() if isinstance(mlp, MlpSpec)}
    one = next(iter(dense.values())) if moe is None else moe.expert
    out = {
        **write_sizes(spec),
        "attention_bias": attention.qkv_bias,
        "use_sliding_window": attention.mask.window is not None,
        "sliding_window": attention.mask.window,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense),
        "hidden_act": ACTIVATION_NAMES[one.activation],
        "rms_norm_eps": first_norm(spec).eps,
        "rope_parameters": write_rotary(attention.rotary),
    }
    if dense:
        out["intermediate_size"] = next(iter(dense.values())).d_ff
    if moe is not None:
        out |= {
            "num_local_experts": moe.n_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.expert.d_ff,
            "norm_topk_prob": moe.normalised,
        }
    return out


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Llama's names, and the experts'."""
    return [*llama_rules(spec), *expert_rules(spec, "mlp", gate="gate_proj", up="up_proj", down="down_proj")]


def _complete(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    gguf_counts(config, "qwen3moe", COUNTS)
    config["norm_topk_prob"] = True  # which the format has no word for, and llama.cpp does


COUNTS = {**GGUF_COUNTS, "expert_feed_forward_length": "moe_intermediate_size"}
GGUF = GgufForm("qwen3moe", COUNTS, complete=_complete)

FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, write, rules, gguf=GGUF)
