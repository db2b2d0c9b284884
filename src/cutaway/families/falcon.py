"""Falcon (Almazrouei et al. 2023): one key/value head or a few, branches side by side, rotary positions or ALiBi."""

from __future__ import annotations

from typing import Any

from cutaway.families.bloom import bloom_rules
from cutaway.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_ROWS,
    first_norm,
    head_width,
    parts,
    spelled,
)
from cutaway.families.family import Family
from cutaway.families.rope import read_rotary, write_rotary
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import WeightRule
from cutaway.spec import (
    AlibiBias,
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

NEW = "new_decoder_architecture"


def read(c: ConfigReader) -> ModelSpec:
    """A ``FalconConfig`` as a spec: the 7B's form, the 40B's (``new_decoder_architecture``), or the RW's."""
    c.raw("model_type", None)
    d_model, n_heads = c.integer(spelled(c, "hidden_size", "n_embed")), c.integer("num_attention_heads")
    d_head = head_width(c, "num_attention_heads", d_model, n_heads)
    max_positions = c.integer("max_position_embeddings", 2048, high=MOST_POSITIONS)
    new, parallel = c.flag(NEW, False), c.flag("parallel_attn", True)
    bias, alibi = c.flag("bias", False), c.flag("alibi", False)
    dropout = c.number("hidden_dropout", 0.0, low=0, high=1)
    attention_dropout = c.number("attention_dropout", 0.0, low=0, high=1)
    if alibi:
        c.keep("rope_parameters", "rope_theta", "rope_scaling")
    elif parallel:
        c.keep("attention_dropout")  # the reference drops weights beside ALiBi only, and nothing here
    attention = AttentionSpec(
        n_heads,
        _kv_heads(c, n_heads, new),
        d_head,
        rotary=None if alibi else read_rotary(c, d_head, max_positions),
        bias=AlibiBias(scaled=True, half=True) if alibi else None,
        qkv_bias=bias,
        out_bias=bias,
        dropout=attention_dropout if alibi else 0.0,
    )
    d_ff = c.integer("ffn_hidden_size", 4 * d_model, high=1 << 24)
    mlp = MlpSpec(d_ff, c.choice("activation", ACTIVATIONS, "gelu"), bias=bias, out_bias=bias)
    norm = NormSpec("layer", c.number("layer_norm_epsilon", 1e-5, above=0), bias=True)
    shared = _shares_norm(c, new, parallel)
    if new and shared and attention.n_kv_heads in (1, n_heads):
        c.keep(NEW)  # the old form says the same, in the same tensors
    branches = (
        BranchSpec("attn", attention, pre_norm=norm, dropout=dropout if parallel else attention_dropout),
        BranchSpec("mlp", mlp, pre_norm=None if shared else norm, dropout=dropout),
    )
    block = BlockSpec(branches, parallel=parallel, shared_norm=shared)
    c.fixed("apply_residual_connection_post_layernorm", (False,), False)
    c.keep("apply_residual_connection_post_layernorm", "ff_factor")
    return ModelSpec(
        family="falcon",
        vocab_size=c.size("vocab_size", high=MOST_ROWS),
        d_model=d_model,
        max_positions=max_positions,
        embedding=EmbeddingSpec(),
        decoder=StackSpec((block,) * c.size("num_hidden_layers", high=MOST_LAYERS), norm),
        head=HeadSpec(c.flag("tie_word_embeddings", True)),
        kept=c.finish(),
    )


def _kv_heads(c: ConfigReader, n_heads: int, new: bool) -> int:
    """``num_kv_heads`` counts in the new form only; in the old one there is one, or one for each head."""
    if new:
        c.keep("multi_query")
        n_kv_heads: int = c.integer("num_kv_heads", n_heads)
        if n_heads % n_kv_heads:
            wanted = f"a divisor of {n_heads}"
            raise c.error("num_kv_heads", "must divide num_attention_heads", expected=wanted, got=n_kv_heads)
        return n_kv_heads
    c.keep("num_kv_heads")
    if c.flag("multi_query", True):
        return 1
    c.fixed("num_kv_heads", (n_heads, None), None)
    return n_heads


def _shares_norm(c: ConfigReader, new: bool, parallel: bool) -> bool:
    """Whether both branches read through one norm. The old form always does where they stand side by side."""
    if new:
        if not parallel:
            raise c.error("parallel_attn", "the new architecture's branches are side by side", expected=True, got=False)
        return bool(c.integer("num_ln_in_parallel_attn", 2, high=2) == 1)
    if parallel:
        c.fixed("num_ln_in_parallel_attn", (1, None), None)
    c.keep("num_ln_in_parallel_attn")
    return parallel


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    block = spec.decoder.layers[0]
    attention, mlp = parts(block)
    old = not block.parallel or (block.shared_norm and attention.n_kv_heads in (1, attention.n_heads))
    form: dict[str, Any] = {"multi_query": attention.n_kv_heads == 1}
    if not old or NEW in dict(spec.kept):
        form = {"num_kv_heads": attention.n_kv_heads, "num_ln_in_parallel_attn": 1 if block.shared_norm else 2}
    if attention.rotary is not None:
        form["rope_parameters"] = write_rotary(attention.rotary)
    if attention.rotary is None or not block.parallel:
        form["attention_dropout"] = attention.dropout if block.parallel else block.branches[0].dropout
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "ffn_hidden_size": mlp.d_ff,
        "max_position_embeddings": spec.max_positions,
        "activation": ACTIVATION_NAMES[mlp.activation],
        "layer_norm_epsilon": first_norm(spec).eps,
        "hidden_dropout": block.branches[1].dropout,
        "bias": mlp.bias,
        "alibi": attention.rotary is None,
        NEW: not old,
        "parallel_attn": block.parallel,
        "tie_word_embeddings": spec.lm.tied,
        **form,
    }


def rules(spec: ModelSpec) -> list[WeightRule]:
    """BLOOM's names; a norm that both branches read through has the first's, two side by side their own."""
    block = spec.decoder.layers[0]
    if block.shared_norm:
        return bloom_rules(spec, {"attn.pre_norm": "input_layernorm"})
    return bloom_rules(spec, {"attn.pre_norm": "ln_attn", "mlp.pre_norm": "ln_mlp"} if block.parallel else None)


FAMILY = Family("falcon", "FalconForCausalLM", read, write, rules, base_prefix="transformer.")
