"""Phi-3, 3.5 and 4 (Abdin et al. 2024): Llama with joined projections, and LongRoPE where the text may be long."""

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
from cutaway.formats.rules import Fuse, WeightRule
from cutaway.spec import (
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LongScaling,
    MaskRule,
    MlpSpec,
    ModelSpec,
    NormSpec,
    StackSpec,
)

ORIGINAL = "original_max_position_embeddings"
# In the hub's configs for code of their own; the reference knows none of these.
ELSEWHERE = {
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}


def read(c: ConfigReader) -> ModelSpec:
    """A ``Phi3Config`` as a spec. Left out, the length before lengthening is 4,096."""
    n = read_sizes(c, max_positions=4096)
    rotary = read_rotary(c, n.d_head, n.max_positions, share=1.0, original=4096)
    if not isinstance(rotary.scaling, LongScaling | None):
        raise c.error("rope_scaling", "this family's rotary positions are plain or LongRoPE", expected="longrope")
    c.keep("embd_pdrop")  # the reference drops nothing there
    for key, value in ELSEWHERE.items():
        c.fixed(key, (value,), value)
    c.keep(*ELSEWHERE)
    attention = AttentionSpec(
        n.n_heads,
        n.n_kv_heads,
        n.d_head,
        mask=MaskRule(window=c.integer("sliding_window", None, high=1 << 40)),
        rotary=rotary,
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    mlp = MlpSpec(n.d_ff, c.choice("hidden_act", ACTIVATIONS, "silu"), gated=True)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-5, above=0))
    block = pre_norm_block(attention, mlp, norm, dropout=c.number("resid_pdrop", 0.0, low=0, high=1))
    return ModelSpec(
        family="phi3",
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
    scaling = attention.rotary.scaling
    return {
        **write_sizes(spec),
        **({ORIGINAL: scaling.original_max_positions} if isinstance(scaling, LongScaling) else {}),
        "sliding_window": attention.mask.window,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "rms_norm_eps": first_norm(spec).eps,
        "rope_parameters": write_rotary(attention.rotary, attention.d_head),
        "resid_pdrop": block.branches[0].dropout,
    }


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Llama's names, but that q, k and v are stored as one, and gate and up."""
    joined: list[WeightRule] = []
    for i, layer in enumerate(spec.decoder.layers):
        attention, mlp = parts(layer)
        ours, theirs = f"decoder.layers.{i}.branches", f"model.layers.{i}"
        queries, keys = attention.n_heads * attention.d_head, attention.n_kv_heads * attention.d_head
        qkv, gate_up = (f"{ours}.attn.body.{x}.weight" for x in "qkv"), ("gate", "up")
        joined += [
            Fuse(tuple(qkv), (f"{theirs}.self_attn.qkv_proj.weight",), (queries, keys, keys)),
            Fuse(
                tuple(f"{ours}.mlp.body.{x}.weight" for x in gate_up),
                (f"{theirs}.mlp.gate_up_proj.weight",),
                (mlp.d_ff, mlp.d_ff),
            ),
        ]
    covered = {name for rule in joined for name in rule.ours}
    return [*(rule for rule in llama_rules(spec) if not covered & set(rule.ours)), *joined]


FAMILY = Family("phi3", "Phi3ForCausalLM", read, write, rules)
