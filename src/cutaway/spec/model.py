"""A whole model, as a list of layers between an embedding and a head."""

from __future__ import annotations

from dataclasses import dataclass

from cutaway.spec.block import BlockSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.position import LearnedPositions, SinusoidalPositions


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Token id to vector.

    Attributes:
        scale: multiplies the token's row (Gemma: the root of d_model; Granite: its own constant).
        round_scale: whether the factor is first rounded to the weights' dtype (Gemma).
        positions: a table added to the rows, if any, learned or computed.
        norm: of the sum (BLOOM).
        dropout: share of the sum dropped in training.
    """

    scale: float = 1.0
    round_scale: bool = False
    positions: LearnedPositions | SinusoidalPositions | None = None
    norm: NormSpec | None = None
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class StackSpec:
    """Layers one after the other, and the norm after the last."""

    layers: tuple[BlockSpec, ...]
    norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Vector to logits.

    Attributes:
        tied: the head's matrix is the embedding table itself.
        bias: whether a learned shift follows.
        scale: multiplies the logits (Granite: one over its divisor).
        soft_cap: logits become ``cap * tanh(logits / cap)``.
    """

    tied: bool
    bias: bool = False
    scale: float = 1.0
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything about a model but its weights.

    Attributes:
        family: the ``model_type`` that reads and writes its config; nothing in the forward pass looks at it.
        vocab_size: rows of the embedding table.
        d_model: width of the residual stream.
        max_positions: longest text the model was trained for, in tokens.
        embedding, decoder, head: the parts.
        kept: config fields that change no number here, as (key, JSON text) pairs, given back on saving.
    """

    family: str
    vocab_size: int
    d_model: int
    max_positions: int
    embedding: EmbeddingSpec
    decoder: StackSpec
    head: HeadSpec
    kept: tuple[tuple[str, str], ...] = ()

    @property
    def n_layers(self) -> int:
        """Layers in the decoder."""
        return len(self.decoder.layers)

    @property
    def position_limit(self) -> int | None:
        """Positions past which there is no number to compute (a learned table's end), or None."""
        table = self.embedding.positions
        return table.limit if isinstance(table, LearnedPositions) else None
