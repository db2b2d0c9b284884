"""What is made of the stream's last vectors: scores of tokens, one vector for a text, or scores of labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cutaway.spec.mlp import Activation
from cutaway.spec.norm import NormSpec


@dataclass(frozen=True, slots=True)
class TransformSpec:
    """``norm(act(W x + b))``: what a head does to a vector before its last matrix.

    Attributes:
        activation: the curve.
        bias: whether there is a b.
        norm: what follows the curve, if anything.
    """

    activation: Activation
    bias: bool = True
    norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Vector to logits, of the next token or of a masked one.

    Attributes:
        tied: the head's matrix is the embedding table itself.
        bias: whether a learned shift follows.
        scale: multiplies the logits (Granite: one over its divisor).
        soft_cap: logits become ``cap * tanh(logits / cap)``.
        transform: comes before the matrix (BERT).
    """

    tied: bool
    bias: bool = False
    scale: float = 1.0
    soft_cap: float | None = None
    transform: TransformSpec | None = None


@dataclass(frozen=True, slots=True)
class PoolerSpec:
    """The vectors of a text to one.

    Attributes:
        pool: the ``"first"`` token's, the ``"last"`` token's, or the ``"mean"`` of all.
        transform: what becomes of it.
        dropout: share dropped in training before the transform.
    """

    pool: Literal["first", "mean", "last"] = "first"
    transform: TransformSpec | None = None
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """Scores of labels, for a text or for each of its tokens.

    Attributes:
        labels: their names, in the order of the scores.
        pooler: how a text's vectors become one; None scores each token.
        transform: comes before the matrix where each token is scored (a pooler has its own).
        bias: whether a learned shift follows the matrix.
        dropout: share dropped in training before the matrix.
        kind: ``"single"`` label of many (softmax), any of them (``"multi"``, each with a sigmoid of its own), or
            ``"regression"``: the scores are the numbers themselves.
    """

    labels: tuple[str, ...]
    pooler: PoolerSpec | None = None
    transform: TransformSpec | None = None
    bias: bool = True
    dropout: float = 0.0
    kind: Literal["single", "multi", "regression"] = "single"
