"""BERT (Devlin et al. 2019): reads both ways, learned positions, token types, LayerNorm after each branch."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import ACTIVATION_NAMES, ACTIVATIONS
from cutaway.families.encoder import (
    BOTH_WAYS,
    KINDS,
    Kind,
    classifier_rules,
    first_encoder,
    kind_of,
    lm_rules,
    norm_rules,
    post_norm_block,
    read_encoder_sizes,
    read_kind,
    read_labels,
    stack_rules,
    transform_rules,
    unused,
    without_pooler,
    write_labels,
)
from cutaway.families.family import Family
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Drop, WeightRule, rename
from cutaway.spec import (
    AttentionSpec,
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

POOLER = PoolerSpec("first", TransformSpec("tanh"))
UNREAD_POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
LAYER_NAMES = {
    "attn.body.q": "attention.self.query",
    "attn.body.k": "attention.self.key",
    "attn.body.v": "attention.self.value",
    "attn.body.out": "attention.output.dense",
    "attn.post_norm": "attention.output.LayerNorm",
    "mlp.body.up": "intermediate.dense",
    "mlp.body.down": "output.dense",
    "mlp.post_norm": "output.LayerNorm",
}


def read(c: ConfigReader) -> ModelSpec:
    """A ``BertConfig`` as a spec."""
    # What was trained from scratch is a masked LM beside a head that only training used.
    kind = read_kind(c, "Bert", {**KINDS, "ForPreTraining": "ForMaskedLM"})
    c.keep("directionality", *(f"pooler_{x}" for x in UNREAD_POOLER))  # of the first release; nobody reads them
    return read_body(c, "bert", kind, offset=0)


def read_body(c: ConfigReader, family: str, kind: Kind, offset: int) -> ModelSpec:
    """What BERT's config and RoBERTa's have in common, which is all but where positions begin and one dropout.

    Args:
        c: the config.
        family: whose it is.
        kind: what the checkpoint is for.
        offset: row of position 0.
    """
    sizes = read_encoder_sizes(c, max_positions=512)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-12, above=0), bias=True)
    dropout = c.number("hidden_dropout_prob", 0.1, low=0, high=1)
    activation = c.choice("hidden_act", ACTIVATIONS, "gelu")
    attention = AttentionSpec(
        sizes.n_heads,
        sizes.n_heads,
        sizes.d_head,
        mask=BOTH_WAYS,
        qkv_bias=True,
        out_bias=True,
        dropout=c.number("attention_probs_dropout_prob", 0.1, low=0, high=1),
    )
    mlp = MlpSpec(sizes.d_ff, activation, bias=True, out_bias=True)
    c.fixed("is_decoder", (False,), False)
    c.keep("is_decoder")
    tied = c.flag("tie_word_embeddings", True)
    last = c.number("classifier_dropout", dropout, low=0, high=1)
    roberta = family != "bert"
    head: HeadSpec | PoolerSpec | ClassifierSpec
    match kind:
        case "ForMaskedLM":
            transform = TransformSpec("gelu" if roberta else activation, norm=norm)
            head = HeadSpec(tied, bias=True, transform=transform)
        case "ForSequenceClassification":
            labels, exclusive = read_labels(c)
            pooler = PoolerSpec("first", TransformSpec("tanh"), last if roberta else 0.0)
            head = ClassifierSpec(labels, pooler, dropout=last, kind=exclusive)
        case "ForTokenClassification":
            labels, exclusive = read_labels(c)
            head = ClassifierSpec(labels, dropout=last, kind=exclusive)
        case "Model":
            head = POOLER
    if kind != "ForMaskedLM":
        c.keep("tie_word_embeddings")
    if not isinstance(head, ClassifierSpec):
        c.keep("classifier_dropout")
    return ModelSpec(
        family=family,
        vocab_size=sizes.vocab_size,
        d_model=sizes.d_model,
        max_positions=max(1, sizes.max_positions - offset),
        embedding=EmbeddingSpec(
            positions=LearnedPositions(sizes.max_positions, offset),
            norm=norm,
            dropout=dropout,
            types=c.integer("type_vocab_size", 2),
        ),
        decoder=StackSpec(),
        head=head,
        encoder=StackSpec((post_norm_block(attention, mlp, norm, dropout=dropout),) * sizes.n_layers),
        kept=c.finish(),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    return write_body(spec, "Bert")


def write_body(spec: ModelSpec, name: str) -> dict[str, Any]:
    """The inverse of :func:`read_body`; ``name`` is what class names begin with."""
    attention, mlp = first_encoder(spec)
    norm, table = spec.embedding.norm, spec.embedding.positions
    assert norm is not None
    assert isinstance(table, LearnedPositions)
    out = {
        "architectures": [f"{name}{kind_of(spec)}"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "intermediate_size": mlp.d_ff,
        "hidden_act": ACTIVATION_NAMES[mlp.activation],
        "hidden_dropout_prob": spec.embedding.dropout,
        "attention_probs_dropout_prob": attention.dropout,
        "max_position_embeddings": table.n_rows,
        "type_vocab_size": spec.embedding.types,
        "layer_norm_eps": norm.eps,
        **write_labels(spec.head),
    }
    if isinstance(spec.head, HeadSpec):
        out["tie_word_embeddings"] = spec.head.tied
    if isinstance(spec.head, ClassifierSpec):
        out["classifier_dropout"] = spec.head.dropout
    return out


def body_rules(spec: ModelSpec, at: str) -> list[WeightRule]:
    """Embedding and layers; ``at`` is what their names begin with."""
    tables = {"tokens": "word_embeddings", "positions": "position_embeddings", "types": "token_type_embeddings"}
    rules: list[WeightRule] = [
        rename(f"embed.{ours}", f"{at}embeddings.{theirs}.weight") for ours, theirs in tables.items()
    ]
    rules += norm_rules("embed.norm", spec.embedding.norm, f"{at}embeddings.LayerNorm")
    rules.append(Drop((f"{at}embeddings.position_ids",)))
    return rules + stack_rules(spec, "encoder", f"{at}encoder.layer.{{i}}", LAYER_NAMES)


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Tensors under BERT's names: with a head, the body's begin with ``bert.``"""
    at = "" if spec.head is None or isinstance(spec.head, PoolerSpec) else "bert."
    found = body_rules(spec, at)
    pooler = unused(f"{at}pooler.dense.weight", f"{at}pooler.dense.bias")
    match spec.head:
        case HeadSpec() as head:
            inside = "cls.predictions"
            found += transform_rules(
                "head.transform", head.transform, f"{inside}.transform.dense", f"{inside}.transform.LayerNorm"
            )
            found += lm_rules(head, f"{inside}.decoder.weight", f"{inside}.bias", f"{inside}.decoder.bias")
            return found + pooler + unused("cls.seq_relationship.weight", "cls.seq_relationship.bias")
        case ClassifierSpec(pooler=PoolerSpec() as first) as head:
            found += transform_rules("head.pooler.transform", first.transform, f"{at}pooler.dense")
            return found + classifier_rules(head, "classifier")
        case ClassifierSpec() as head:
            return found + pooler + classifier_rules(head, "classifier")
        case PoolerSpec() as alone:
            return found + transform_rules("head.transform", alone.transform, f"{at}pooler.dense")
        case None:
            return found


FAMILY = Family("bert", "", read, write, rules, base_prefix="", settle=without_pooler)
