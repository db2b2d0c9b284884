"""Marian (Junczys-Dowmunt et al. 2018): translation by the encoder–decoder of 2017, sines and cosines in halves."""

from __future__ import annotations

from typing import Any

import torch

from cutaway.errors import UnsupportedModelError
from cutaway.families.common import MOST_ROWS
from cutaway.families.family import Family, Stored
from cutaway.families.seq2seq import body_rules, head_rules, read_body, read_class, write_body
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import WeightRule
from cutaway.spec import HeadSpec, ModelSpec, SinusoidalPositions


def read(c: ConfigReader) -> ModelSpec:
    """A ``MarianConfig`` as a spec.

    The two sides share one table, or have one each, of ``vocab_size`` rows for the source and ``decoder_vocab_size``
    for the target. Shared but not tied to the head means one each in the reference, so it does here.
    """
    name = read_class(c, ("MarianMTModel", "MarianModel"))
    shared, tied = c.flag("share_encoder_decoder_embeddings", True), c.flag("tie_word_embeddings", True)
    vocab_size = c.size("vocab_size", high=MOST_ROWS)
    ours = c.integer("decoder_vocab_size", vocab_size, high=MOST_ROWS)
    if shared and ours != vocab_size:
        what = "is not vocab_size, though both sides share a table"
        raise c.error("decoder_vocab_size", what, expected=vocab_size, got=ours)
    if name == "MarianModel" and not shared:
        c.keep("tie_word_embeddings")  # there is nothing to tie
    return read_body(
        c,
        "marian",
        vocab_size=ours,
        source_vocab_size=None if shared and tied else vocab_size,
        positions=SinusoidalPositions("halves"),
        normed=False,
        head=None if name == "MarianModel" else HeadSpec(tied, bias=True),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The inverse of :func:`read`."""
    return {
        "architectures": ["MarianModel" if spec.head is None else "MarianMTModel"],
        "vocab_size": spec.source_vocab_size or spec.vocab_size,
        "decoder_vocab_size": spec.vocab_size,
        "share_encoder_decoder_embeddings": spec.source_vocab_size is None,
        "tie_word_embeddings": True if spec.head is None else spec.lm.tied,
        **write_body(spec),
    }


def rules(spec: ModelSpec) -> list[WeightRule]:
    """Tensors under Marian's names: with a head, the body's begin with ``model.``"""
    return body_rules(spec, "" if spec.head is None else "model.") + head_rules(spec)


def settle(spec: ModelSpec, stored: Stored) -> ModelSpec:
    """As the config has it, where tables of positions that were stored all the same hold the waves.

    Raises:
        UnsupportedModelError: they hold something else.
    """
    known = {*stored.names()}
    for name in (f"{at}{side}.embed_positions.weight" for at in ("", "model.") for side in ("encoder", "decoder")):
        if name in known:
            table = stored.read(name).double()
            n_rows, width = (*table.shape, 0)[:2]
            speeds = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / max(width, 1))
            angles = torch.arange(n_rows, dtype=torch.float64)[:, None] * speeds
            waves = torch.cat([angles.sin(), angles.cos()], -1)
            if table.shape != waves.shape or not torch.allclose(table, waves, rtol=0, atol=1e-2):
                raise UnsupportedModelError("positions that are no sines and cosines", field=name)
    return spec


FAMILY = Family("marian", "", read, write, rules, base_prefix="", settle=settle)
