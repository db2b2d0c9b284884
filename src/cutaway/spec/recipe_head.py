"""What a recipe says of the head: scores of tokens, scores of labels, or one vector for a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from cutaway.errors import ConfigError
from cutaway.spec.head import ClassifierSpec, HeadSpec, PoolerSpec, TransformSpec
from cutaway.spec.mlp import Activation
from cutaway.spec.norm import NormSpec
from cutaway.spec.recipe_words import Words
from cutaway.spec.serial import read

__all__ = ["read_head"]

_OF_TOKENS = ("tied", "logit_scale", "logit_cap", "head_bias")  # what scores of tokens have and no other head


def read_head(
    words: Words, layer: Words, norm: NormSpec, usual: Literal["first", "last"]
) -> HeadSpec | PoolerSpec | ClassifierSpec:
    """Scores of tokens; or what labels and pool say.

    Args:
        words, layer: those of the model, and those that a layer may differ in.
        norm: what they come to.
        usual: whose vector is a text's, where nothing is said.

    Raises:
        ConfigError: words that have no use beside one another.
    """
    labels, dropout = words.get("labels"), words.get("dropout", 0.0)
    pool: Any = words.get("pool")
    pool = "first" if pool == "cls" else pool  # as BERT's first token is called
    transformed = words.get("head_transform", False)
    if labels is None and pool is None:
        act: Activation = layer.get("activation", "silu")
        return HeadSpec(
            words.get("tied", True),
            bias=words.get("head_bias", False),
            scale=words.get("logit_scale", 1.0),
            soft_cap=words.get("logit_cap"),
            transform=TransformSpec(act, norm=norm) if transformed else None,
        )
    for key in _OF_TOKENS:
        if words.get(key) is not None:
            raise ConfigError("is about scores of tokens", field=f"/{key}", expected=None, got=words.get(key))
    pooler = None
    if pool != "none":
        pooler = PoolerSpec(pool or usual, TransformSpec("tanh") if transformed else None)
    elif labels is None or transformed:
        at = "/pool" if labels is None else "/head_transform"
        raise ConfigError("is for labels of a text", field=at, expected=None, got=words.get(at[1:]))
    if labels is None:
        assert pooler is not None
        return pooler
    if isinstance(labels, Mapping):
        return read(ClassifierSpec, labels, "/labels", pooler=pooler, dropout=dropout)
    if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
        raise ConfigError("of a wrong type", field="/labels", expected="a list of names, or an object", got=labels)
    return ClassifierSpec(tuple(labels), pooler, dropout=dropout)
