"""DistilBERT (Sanh et al. 2019): a BERT of half the layers, without token types and without a pooler."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_ROWS,
    head_width,
    spelled,
)
from cutaway.families.encoder import (
    BOTH_WAYS,
    classifier_rules,
    first_encoder,
    kind_of,
    lm_rules,
    norm_rules,
    read_kind,
    read_labels,
    stack_rules,
    transform_rules,
    write_labels,
)
from cutaway.families.family import Family
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Drop, WeightRule, rename
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    ClassifierSpec,
    EmbeddingSpec,
    HeadSpec,
    LearnedPositions,
    MlpSpec,
    ModelSpec,
    NormSpec,
    PoolerSpec,
    StackSpec,
    TransformSpec,
)

NORM = NormSpec("layer", 1e-12, bias=True)
POOLER = PoolerSpec("first", TransformSpec("relu"))
LAYER_NAMES = {
    **{f"attn.body.{x}": f"attention.{x}_lin" for x in ("q", "k", "v", "out")},
    "attn.post_norm": "sa_layer_norm",
    "mlp.body.up": "ffn.lin1",
    "mlp.body.down": "ffn.lin2",
    "mlp.post_norm": "output_layer_norm",
}


def read(c: ConfigReader) -> ModelSpec:
    """A ``DistilBertConfig`` as a spec."""
    kind = read_kind(c, "DistilBert")
    c.raw("model_type", None)
    d_model = c.integer(spelled(c, "dim", "hidden_size"))
    heads = spelled(c, "n_heads", "num_attention_heads")
    n_heads = c.integer(heads)
    dropout = c.number("dropout", 0.1, low=0, high=1)
    activation = c.choice("activation", ACTIVATIONS, "gelu")
    attention = AttentionSpec(
        n_heads,
        n_heads,
        head_width(c, heads, d_model, n_heads),
        mask=BOTH_WAYS,
        qkv_bias=True,
        out_bias=True,
        dropout=c.number("attention_dropout", 0.1, low=0, high=1),
    )
    mlp = MlpSpec(c.integer("hidden_dim", high=1 << 24), activation, bias=True, out_bias=True)
    branches = (
        BranchSpec("attn", attention, post_norm=NORM),
        BranchSpec("mlp", mlp, post_norm=NORM, dropout=dropout),
    )
    # Waves are what the table of positions started as; it is stored all the same.
    c.keep("sinusoidal_pos_embds", "qa_dropout", "tie_weights_")
    tied, last = c.flag("tie_word_embeddings", True), c.number("seq_classif_dropout", 0.2, low=0, high=1)
    if kind != "ForMaskedLM":
        c.keep("tie_word_embeddings")
    if kind != "ForSequenceClassification":
        c.keep("seq_classif_dropout")
    head: HeadSpec | ClassifierSpec | None = None
    if kind == "ForMaskedLM":
        head = HeadSpec(tied, bias=True, transform=TransformSpec(activation, norm=NORM))
    elif kind != "Model":
        labels, exclusive = read_labels(c)
        pooler, share = (POOLER, last) if kind == "ForSequenceClassification" else (None, dropout)
        head = ClassifierSpec(labels, pooler, dropout=share, kind=exclusive)
    n_rows = c.integer("max_position_embeddings", 512, high=MOST_POSITIONS)
    return ModelSpec(
        family="distilbert",
        vocab_size=c.size("vocab_size", high=MOST_ROWS),
        d_model=d_model,
        max_positions=n_rows,
        embedding=EmbeddingSpec(positions=LearnedPositions(n_rows), norm=NORM, dropout=dropout),
        decoder=StackSpec(),
        head=head,
        encoder=StackSpec(
            (BlockSpec(branches),) * c.size(spelled(c, "n_layers", "num_hidden_layers"), high=MOST_LAYERS)
        ),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    attention, mlp = first_encoder(spec)
    out = {
        "architectures": [f"DistilBert{kind_of(spec)}"],
        "vocab_size": spec.vocab_size,
        "dim": spec.d_model,
        "n_layers": spec.n_layers,
        "n_heads": attention.n_heads,
        "hidden_dim": mlp.d_ff,
        "activation": ACTIVATION_NAMES[mlp.activation],
        "dropout": spec.embedding.dropout,
        "attention_dropout": attention.dropout,
        "max_position_embeddings": spec.max_positions,
        **write_labels(spec.head),
    }
    if isinstance(spec.head, HeadSpec):
        out["tie_word_embeddings"] = spec.head.tied
    if isinstance(spec.head, ClassifierSpec) and spec.head.pooler is not None:
        out["seq_classif_dropout"] = spec.head.dropout
    return out


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Tensors under DistilBERT's names: with a head, the body's begin with ``distilbert.``"""
    at = "" if spec.head is None else "distilbert."
    found: list[WeightRule] = [
        rename("embed.tokens", f"{at}embeddings.word_embeddings.weight"),
        rename("embed.positions", f"{at}embeddings.position_embeddings.weight"),
        *norm_rules("embed.norm", spec.embedding.norm, f"{at}embeddings.LayerNorm"),
        Drop((f"{at}embeddings.position_ids",)),
        *stack_rules(spec, "encoder", f"{at}transformer.layer.{{i}}", LAYER_NAMES),
    ]
    if isinstance(spec.head, HeadSpec):
        found += transform_rules("head.transform", spec.head.transform, "vocab_transform", "vocab_layer_norm")
        found += lm_rules(spec.head, "vocab_projector.weight", "vocab_projector.bias")
    elif isinstance(spec.head, ClassifierSpec):
        if spec.head.pooler is not None:
            found += transform_rules("head.pooler.transform", spec.head.pooler.transform, "pre_classifier")
        found += classifier_rules(spec.head, "classifier")
    return found


FAMILY = Family("distilbert", "", read, write, rules, base_prefix="")
