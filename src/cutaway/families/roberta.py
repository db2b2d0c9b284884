"""RoBERTa (Liu et al. 2019): BERT with positions that begin after the pad's row, and a classifier without a pooler."""

from __future__ import annotations

from typing import Any

from cutaway.families.bert import body_rules, read_body, write_body
from cutaway.families.encoder import classifier_rules, lm_rules, read_kind, transform_rules, unused, without_pooler
from cutaway.families.family import Family
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import WeightRule
from cutaway.spec import ClassifierSpec, HeadSpec, LearnedPositions, ModelSpec, PoolerSpec


def read(c: ConfigReader) -> ModelSpec:
    """A ``RobertaConfig`` as a spec: rows of the table up to the pad's id are no position's."""
    kind = read_kind(c, "Roberta")
    pad = c.integer("pad_token_id", 1, low=0)
    n_rows = c.integer("max_position_embeddings", 512, high=1 << 40)
    if pad + 1 >= n_rows:
        wanted = f"more than {pad + 1}, pad_token_id and one"
        raise c.error("max_position_embeddings", "leaves no position", expected=wanted, got=n_rows)
    return read_body(c, "roberta", kind, offset=pad + 1)


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    table = spec.embedding.positions
    assert isinstance(table, LearnedPositions)
    return {**write_body(spec, "Roberta"), "pad_token_id": table.offset - 1}


def rules(spec: ModelSpec) -> list[WeightRule]:
    """BERT's names but for the heads': with one, the body's begin with ``roberta.``"""
    at = "" if spec.head is None or isinstance(spec.head, PoolerSpec) else "roberta."
    found = body_rules(spec, at)
    pooler = unused(f"{at}pooler.dense.weight", f"{at}pooler.dense.bias")
    match spec.head:
        case HeadSpec() as head:
            found += transform_rules("head.transform", head.transform, "lm_head.dense", "lm_head.layer_norm")
            return found + pooler + lm_rules(head, "lm_head.decoder.weight", "lm_head.bias", "lm_head.decoder.bias")
        case ClassifierSpec(pooler=PoolerSpec() as first) as head:
            found += transform_rules("head.pooler.transform", first.transform, "classifier.dense")
            return found + pooler + classifier_rules(head, "classifier.out_proj")
        case ClassifierSpec() as head:
            return found + pooler + classifier_rules(head, "classifier")
        case PoolerSpec() as alone:
            return found + transform_rules("head.transform", alone.transform, "pooler.dense")
        case None:
            return found


FAMILY = Family("roberta", "", read, write, rules, base_prefix="", settle=without_pooler)
