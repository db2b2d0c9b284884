"""BLOOM (BigScience 2022): ALiBi, a norm on the embedding, q·k·v in one matrix, head by head."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import MOST_LAYERS, MOST_ROWS, first_norm, head_width, layer_rules, spelled
from cutaway.families.family import Family
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Fuse, Tie, WeightRule, rename
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

# How the training code went about it.
TRAINING = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
)


def read(c: ConfigReader) -> ModelSpec:
    """A ``BloomConfig`` as a spec."""
    c.raw("model_type", None)
    d_model, heads = c.integer(spelled(c, "hidden_size", "n_embed")), spelled(c, "n_head", "num_attention_heads")
    n_heads = c.integer(heads)
    attention = AttentionSpec(
        n_heads,
        n_heads,
        head_width(c, heads, d_model, n_heads),
        bias=AlibiBias(),
        qkv_bias=True,
        out_bias=True,
        dropout=c.number("attention_dropout", 0.0, low=0, high=1),
    )
    mlp = MlpSpec(4 * d_model, "gelu_tanh", bias=True, out_bias=True)
    norm = NormSpec("layer", c.number("layer_norm_epsilon", 1e-5, above=0), bias=True)
    dropout = c.number("hidden_dropout", 0.0, low=0, high=1)
    branches = (
        BranchSpec("attn", attention, pre_norm=norm, dropout=dropout),
        BranchSpec("mlp", mlp, pre_norm=norm, dropout=dropout),
    )
    n_layers = c.size(spelled(c, "n_layer", "num_hidden_layers"), high=MOST_LAYERS)
    c.fixed("apply_residual_connection_post_layernorm", (False,), False)
    c.fixed("n_inner", (None, 4 * d_model), None)
    # Into how many parts training cut the matrices: summed in parts, exactly, the numbers are the same, but the
    # reference then leaves out the biases.
    if c.integer("pretraining_tp", 1) > 1:
        c.fixed("slow_but_exact", (False,), False)
    c.keep("seq_length", "n_inner", "pretraining_tp", "slow_but_exact", *TRAINING)
    return ModelSpec(
        family="bloom",
        vocab_size=c.size("vocab_size", high=MOST_ROWS),
        d_model=d_model,
        max_positions=c.integer("seq_length", 2048),
        embedding=EmbeddingSpec(norm=norm),
        decoder=StackSpec((BlockSpec(branches),) * n_layers, norm),
        head=HeadSpec(c.flag("tie_word_embeddings", True)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    block = spec.decoder.layers[0]
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "n_layer": spec.n_layers,
        "n_head": block.attention.n_heads,
        "layer_norm_epsilon": first_norm(spec).eps,
        "hidden_dropout": block.branches[0].dropout,
        "attention_dropout": block.attention.dropout,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": spec.lm.tied,
    }


IN_ORDER = {"attn.pre_norm": "input_layernorm", "mlp.pre_norm": "post_attention_layernorm"}


def bloom_rules(spec: ModelSpec, norms: dict[str, str] | None = None) -> list[WeightRule]:
    """Tensors under the names that BLOOM gave them, and Falcon after it.

    Args:
        spec: whose tensors.
        norms: our norm → its name in a layer.
    """
    out: list[WeightRule] = [rename("embed.tokens", "transformer.word_embeddings.weight")]
    kinds = ("weight", "bias")
    if spec.embedding.norm is not None:
        out += [rename(f"embed.norm.{kind}", f"transformer.word_embeddings_layernorm.{kind}") for kind in kinds]
    names = {
        "attn.body.out": "self_attention.dense",
        "mlp.body.up": "mlp.dense_h_to_4h",
        "mlp.body.down": "mlp.dense_4h_to_h",
        **(norms or IN_ORDER),
    }
    for i, layer in enumerate(spec.decoder.layers):
        at, body = f"transformer.h.{i}", layer.attention
        out += layer_rules(layer, i, at, names)
        n_rows = tuple(n * body.d_head for n in (body.n_heads, body.n_kv_heads, body.n_kv_heads))
        for kind in kinds if body.qkv_bias else kinds[:1]:  # the queries of one key head, then it and its value head
            qkv = tuple(f"decoder.layers.{i}.branches.attn.body.{name}.{kind}" for name in "qkv")
            stored = (f"{at}.self_attention.query_key_value.{kind}",)
            out.append(Fuse(qkv, stored, n_rows, groups=body.n_kv_heads))
    out += [rename(f"decoder.norm.{kind}", f"transformer.ln_f.{kind}") for kind in kinds]
    if spec.lm.tied:
        return [*out, Tie(("lm_head.weight",), same_as="embed.tokens")]
    return [*out, rename("head.weight", "lm_head.weight")]


FAMILY = Family("bloom", "BloomForCausalLM", read, write, bloom_rules, base_prefix="transformer.")
