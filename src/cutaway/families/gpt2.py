"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases, one fused q·k·v matrix."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import ACTIVATIONS, MOST_LAYERS, MOST_POSITIONS, MOST_ROWS, parts
from cutaway.families.family import Family, GgufForm
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Drop, Fuse, Tie, Transpose, WeightRule, rename
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    LearnedPositions,
    MlpSpec,
    ModelSpec,
    NormSpec,
    StackSpec,
)

# Settings of a classification head that a language model does not have.
SUMMARY = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "reorder_and_upcast_attn",  # the same numbers in fp32
    "n_ctx",
)


def read(c: ConfigReader) -> ModelSpec:
    """A ``GPT2Config`` as a spec."""
    c.raw("model_type", None)
    d_model, n_heads = c.integer("n_embd"), c.integer("n_head")
    if d_model % n_heads:
        raise c.error("n_head", "must divide n_embd", expected=f"a divisor of {d_model}", got=n_heads)
    d_head = d_model // n_heads
    n_layers = c.size("n_layer", high=MOST_LAYERS)
    n_positions = c.integer("n_positions", 1024, high=MOST_POSITIONS)
    norm = NormSpec("layer", c.number("layer_norm_epsilon", 1e-5, above=0), bias=True)
    d_ff = c.integer("n_inner", 4 * d_model, high=1 << 24)
    mlp = MlpSpec(d_ff, c.choice("activation_function", ACTIVATIONS, "gelu_new"), bias=True, out_bias=True)
    scale = d_head**-0.5 if c.flag("scale_attn_weights", True) else 1.0
    by_layer = c.flag("scale_attn_by_inverse_layer_idx", False)
    dropout, weight_dropout = c.number("resid_pdrop", 0.1, low=0, high=1), c.number("attn_pdrop", 0.1, low=0, high=1)
    c.keep(*SUMMARY)
    if by_layer and n_layers == 1:
        c.keep("scale_attn_by_inverse_layer_idx")  # one layer alone does not show it

    def block(i: int) -> BlockSpec:
        attention = AttentionSpec(
            n_heads,
            n_heads,
            d_head,
            scale=scale / (i + 1) if by_layer else scale,
            qkv_bias=True,
            out_bias=True,
            dropout=weight_dropout,
        )
        return BlockSpec(
            (
                BranchSpec("attn", attention, pre_norm=norm, dropout=dropout),
                BranchSpec("mlp", mlp, pre_norm=norm, dropout=dropout),
            )
        )

    return ModelSpec(
        family="gpt2",
        vocab_size=c.size("vocab_size", high=MOST_ROWS),
        d_model=d_model,
        max_positions=n_positions,
        embedding=EmbeddingSpec(
            positions=LearnedPositions(n_positions), dropout=c.number("embd_pdrop", 0.1, low=0, high=1)
        ),
        decoder=StackSpec(tuple(block(i) for i in range(n_layers)), norm),
        head=HeadSpec(c.flag("tie_word_embeddings", True)),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    first = spec.decoder.layers[0]
    attention, mlp = parts(first)
    norm, table = first.branches[0].pre_norm, spec.embedding.positions
    assert norm is not None
    assert isinstance(table, LearnedPositions)
    scales = [layer.attention.score_scale for layer in spec.decoder.layers]
    return {
        "vocab_size": spec.vocab_size,
        "n_embd": spec.d_model,
        "n_layer": spec.n_layers,
        "n_head": attention.n_heads,
        "n_positions": table.n_rows,
        "n_inner": mlp.d_ff,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(mlp.activation, mlp.activation),
        "layer_norm_epsilon": norm.eps,
        "resid_pdrop": first.branches[0].dropout,
        "embd_pdrop": spec.embedding.dropout,
        "attn_pdrop": attention.dropout,
        "scale_attn_weights": scales[0] != 1.0,
        "scale_attn_by_inverse_layer_idx": len(scales) > 1 and scales[1] != scales[0],
        "tie_word_embeddings": spec.lm.tied,
    }


def rules(spec: ModelSpec) -> list[WeightRule]:
    """GPT-2 keeps its matrices [in, out]."""
    out: list[WeightRule] = [
        rename("embed.tokens", "transformer.wte.weight"),
        rename("embed.positions", "transformer.wpe.weight"),
    ]
    for i in range(spec.n_layers):
        ours, theirs = f"decoder.layers.{i}.branches", f"transformer.h.{i}"
        for name, stored in (("attn.pre_norm", "ln_1"), ("mlp.pre_norm", "ln_2")):
            out += [rename(f"{ours}.{name}.{kind}", f"{theirs}.{stored}.{kind}") for kind in ("weight", "bias")]
        for kind in ("weight", "bias"):
            qkv = tuple(f"{ours}.attn.body.{name}.{kind}" for name in "qkv")
            out.append(Fuse(qkv, (f"{theirs}.attn.c_attn.{kind}",), (spec.d_model,) * 3, transposed=True))
        plain = {"attn.body.out": "attn.c_proj", "mlp.body.up": "mlp.c_fc", "mlp.body.down": "mlp.c_proj"}
        for name, stored in plain.items():
            out.append(Transpose((f"{ours}.{name}.weight",), (f"{theirs}.{stored}.weight",)))
            out.append(rename(f"{ours}.{name}.bias", f"{theirs}.{stored}.bias"))
        # Older files carry the causal mask as a tensor.
        out += [Drop((f"{theirs}.attn.bias",)), Drop((f"{theirs}.attn.masked_bias",))]
    out += [rename(f"decoder.norm.{kind}", f"transformer.ln_f.{kind}") for kind in ("weight", "bias")]
    if spec.lm.tied:
        return [*out, Tie(("lm_head.weight",), same_as="embed.tokens")]
    return [*out, rename("head.weight", "lm_head.weight")]


def gguf_fused(spec: ModelSpec) -> list[WeightRule]:
    """q, k and v lie in one tensor, [out, in] there."""
    return [
        Fuse(
            tuple(f"decoder.layers.{i}.branches.attn.body.{name}.{kind}" for name in "qkv"),
            (f"blk.{i}.attn_qkv.{kind}",),
            (spec.d_model,) * 3,
        )
        for i in range(spec.n_layers)
        for kind in ("weight", "bias")
    ]


GGUF_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}

FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    read,
    write,
    rules,
    base_prefix="transformer.",
    gguf=GgufForm("gpt2", keys=GGUF_KEYS, alter=gguf_fused),
)
