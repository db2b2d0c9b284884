"""Gemma 2 (Gemma Team 2024): a norm on both sides of each branch, capped scores and logits, every other layer local."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    first_norm,
    parts,
    read_sizes,
    read_windows,
    write_sizes,
    write_windows,
)
from cutaway.families.family import Family
from cutaway.families.gemma3 import KINDS, rules
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
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
    StackSpec,
)


def _cap(c: ConfigReader, key: str, default: float) -> float | None:
    """A soft cap. Left out, it is the default; null, there is none."""
    return None if c.raw(key, default) is None else float(c.number(key, default, above=0))


def _windows(c: ConfigReader, n_layers: int) -> list[int | None]:
    """The even layers slide, unless ``layer_types`` says otherwise."""
    window = None if c.raw("sliding_window", 4096) is None else c.integer("sliding_window", 4096, high=1 << 40)
    windows = read_windows(c, n_layers, window, [KINDS[(i + 1) % 2] for i in range(n_layers)])
    c.fixed("sliding_window_size", (None, window), None)  # the same under an older name
    c.keep("sliding_window_size", *(() if any(windows) else ("sliding_window",)))
    return windows


def read(c: ConfigReader) -> ModelSpec:
    """A ``Gemma2Config`` as a spec."""
    n = read_sizes(c, max_positions=8192, d_head=256, n_kv_heads=4)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6, above=0), offset=1.0, cast="after")
    mlp = MlpSpec(n.d_ff, c.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"), gated=True)
    c.fixed("hidden_act", (None, c.raw("hidden_activation", "gelu_pytorch_tanh")), None)  # said twice on the hub
    c.keep("hidden_act")
    rotary = read_rotary(c, n.d_head, n.max_positions)
    bias = c.flag("attention_bias", False)
    scale = c.number("query_pre_attn_scalar", 256, above=0) ** -0.5
    c.keep("query_pre_attn_scalar")
    dropout = c.number("attention_dropout", 0.0, low=0, high=1)
    cap = _cap(c, "attn_logit_softcapping", 50.0)

    def block(window: int | None) -> BlockSpec:
        attention = AttentionSpec(
            n.n_heads,
            n.n_kv_heads,
            n.d_head,
            mask=MaskRule(window=window),
            rotary=rotary,
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
        family="gemma2",
        vocab_size=n.vocab_size,
        d_model=n.d_model,
        max_positions=n.max_positions,
        embedding=EmbeddingSpec(scale=n.d_model**0.5, round_scale=True),
        decoder=StackSpec(tuple(block(window) for window in _windows(c, n.n_layers)), norm),
        head=HeadSpec(c.flag("tie_word_embeddings", True), soft_cap=_cap(c, "final_logit_softcapping", 30.0)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = parts(spec.decoder.layers[0])
    assert attention.rotary is not None
    return {
        **write_sizes(spec),
        **write_windows(spec),
        "attention_bias": attention.qkv_bias,
        "hidden_activation": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": first_norm(spec).eps,
        "rope_parameters": write_rotary(attention.rotary),
        "query_pre_attn_scalar": round(attention.score_scale**-2),
        "attn_logit_softcapping": attention.soft_cap,
        "final_logit_softcapping": spec.lm.soft_cap,
    }


FAMILY = Family("gemma2", "Gemma2ForCausalLM", read, write, rules)
