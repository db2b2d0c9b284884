"""BART (Lewis et al. 2020): the encoder–decoder of 2017 with learned positions, GELU, and a norm of the embedding."""

from __future__ import annotations

from typing import Any

from cutaway.families.common import MOST_POSITIONS, MOST_ROWS
from cutaway.families.family import Family
from cutaway.families.seq2seq import DEFAULT_POSITIONS, body_rules, head_rules, read_body, read_class, write_body
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import WeightRule
from cutaway.spec import HeadSpec, LearnedPositions, ModelSpec

OFFSET = 2  # the first rows of the table of positions are nobody's


def read(c: ConfigReader) -> ModelSpec:
    """A ``BartConfig`` as a spec. Untied, nothing is shared: either side has a table of its own, and the head too."""
    name = read_class(c, ("BartForConditionalGeneration", "BartModel"))
    tied = c.flag("tie_word_embeddings", True)
    vocab_size = c.size("vocab_size", high=MOST_ROWS)
    c.fixed("extra_pos_embeddings", (OFFSET,), OFFSET)
    n_rows = c.integer("max_position_embeddings", DEFAULT_POSITIONS, high=MOST_POSITIONS) + OFFSET
    return read_body(
        c,
        "bart",
        vocab_size=vocab_size,
        source_vocab_size=None if tied else vocab_size,
        positions=LearnedPositions(n_rows, OFFSET),
        normed=True,
        head=None if name == "BartModel" else HeadSpec(tied, bias=True),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    return {
        "architectures": ["BartModel" if spec.head is None else "BartForConditionalGeneration"],
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.source_vocab_size is None,
        **write_body(spec),
    }


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Tensors under BART's names: with a head, the body's begin with ``model.``"""
    return body_rules(spec, "" if spec.head is None else "model.") + head_rules(spec)


FAMILY = Family("bart", "", read, write, rules, base_prefix="")
