"""A whole model, as lists of layers between an embedding and a head."""

from __future__ import annotations

from dataclasses import dataclass

from cutaway.spec.block import BlockSpec
from cutaway.spec.head import ClassifierSpec, HeadSpec, PoolerSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.position import LearnedPositions, SinusoidalPositions


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Token id to vector.

    Attributes:
        scale: multiplies the token's row (Gemma: the root of d_model; Granite: its own constant).
        round_scale: whether the factor is first rounded to the weights' dtype (Gemma).
        positions: a table added to the rows, if any, learned or computed.
        norm: of the sum (BLOOM, BERT).
        dropout: share of the sum dropped in training.
        types: rows of a table of token types, added too; 0 for no such table (BERT: one type a sentence).
    """

    scale: float = 1.0
    round_scale: bool = False
    positions: LearnedPositions | SinusoidalPositions | None = None
    norm: NormSpec | None = None
    dropout: float = 0.0
    types: int = 0


@dataclass(frozen=True, slots=True)
class StackSpec:
    """Layers one after the other, and the norm after the last.

    Attributes:
        layers: none at all where a model has no such stack.
        norm: of the stream when it leaves.
        dropout: share of what leaves that is dropped in training (T5).
    """

    layers: tuple[BlockSpec, ...] = ()
    norm: NormSpec | None = None
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything about a model but its weights.

    ::

        decoder only       ids ──► embedding ──► decoder ──► head
        encoder only       ids ──► embedding ──► encoder ──► head
        encoder–decoder    source ids ──► source ──► encoder ──┐ cross-attention
                           ids ──► embedding ──────► decoder ◄─┘──► head

    Attributes:
        family: the ``model_type`` that reads and writes its config; nothing in the forward pass looks at it.
        vocab_size: rows of the embedding table.
        d_model: width of the residual stream.
        max_positions: longest text the model was trained for, in tokens.
        embedding, decoder, head: the parts. No head: the stream itself is what one asks for.
        encoder: layers that read a text both ways.
        source: of an encoder–decoder, how the source's tokens become vectors.
        source_vocab_size: rows of the source's own table of tokens; None where it shares the decoder's.
        kept: config fields that change no number here, as (key, JSON text) pairs, given back on saving.
    """

    family: str
    vocab_size: int
    d_model: int
    max_positions: int
    embedding: EmbeddingSpec
    decoder: StackSpec
    head: HeadSpec | PoolerSpec | ClassifierSpec | None
    encoder: StackSpec = StackSpec()
    source: EmbeddingSpec | None = None
    source_vocab_size: int | None = None
    kept: tuple[tuple[str, str], ...] = ()

    @property
    def stacks(self) -> dict[str, StackSpec]:
        """The stacks that there are, by name, in the order in which they run."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in both.items() if stack.layers}

    @property
    def main(self) -> str:
        """The stack whose output the head reads."""
        return "decoder" if self.decoder.layers else "encoder"

    @property
    def generates(self) -> bool:
        """Whether it says what comes next: it has a decoder, scores tokens, and no token sees a later one."""
        causal = all(layer.attention.mask.causal for layer in self.decoder.layers)
        return self.main == "decoder" and isinstance(self.head, HeadSpec) and causal

    @property
    def n_layers(self) -> int:
        """Layers that end at the head: an encoder–decoder's are the decoder's."""
        return len(self.stacks[self.main].layers) if self.stacks else 0

    @property
    def lm(self) -> HeadSpec:
        """The head, where it scores tokens."""
        if not isinstance(self.head, HeadSpec):
            raise LookupError("this model has no head that scores tokens")
        return self.head

    @property
    def position_limit(self) -> int | None:
        """Positions past which there is no number to compute (a learned table's end), or None."""
        return _limit(self.embedding)

    @property
    def source_limit(self) -> int | None:
        """The same of an encoder–decoder's source."""
        return None if self.source is None else _limit(self.source)


def _limit(spec: EmbeddingSpec) -> int | None:
    return spec.positions.limit if isinstance(spec.positions, LearnedPositions) else None
