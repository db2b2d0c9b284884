"""What is explained: one number of what a model answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids
from cutaway.spec import ClassifierSpec, HeadSpec, ModelSpec

Kind: TypeAlias = Literal["logit", "difference", "logprob", "label"]


@dataclass(frozen=True, slots=True)
class Target:
    """One number of one text's answer, as data: what is explained, so that it can be taken apart and derived.

    Sweeps over pairs of texts take one as their :data:`Metric`, which may be a function too, or differ between pairs.

    Attributes:
        kind: the ``"logit"`` of a token, the ``"difference"`` of two tokens' logits, a token's log-probability
            (``"logprob"``), or a ``"label"``'s score of a classifier, before any softmax.
        ids: the token, the two, or the label's number.
    """

    kind: Kind
    ids: tuple[int, ...]


Of: TypeAlias = int | str | tuple[int, int] | Target
"""A token's logit by its id, the difference of two, a label by its name; or any :class:`Target`."""


def logprob(token: int) -> Target:
    """The log-probability of a token."""
    return Target("logprob", (token,))


def target_of(spec: ModelSpec, of: object) -> Target:
    """What ``of`` means for a model.

    Raises:
        RequestError: no such token or label, or a model that scores neither.
    """
    labels = spec.head.labels if isinstance(spec.head, ClassifierSpec) else ()
    target = _plain(of, labels)
    if isinstance(spec.head, ClassifierSpec):
        if target.kind == "logit":
            target = Target("label", target.ids)
    elif target.kind == "label" or not isinstance(spec.head, HeadSpec):
        what = "this model scores no labels" if target.kind == "label" else "this model scores no tokens"
        raise RequestError(what, field="of", got=of, hint="A function of the answer will do for any model.")
    rows, word = (len(labels), "label") if labels else (spec.vocab_size, "token")
    for number in target.ids:
        if not 0 <= number < rows:
            raise RequestError(f"no such {word}", field="of", expected=f"0…{rows - 1}", got=number)
    if len(target.ids) != (2 if target.kind == "difference" else 1):
        raise RequestError("one number, or two for a difference", field="of", got=list(target.ids))
    return target


def _plain(of: Any, labels: tuple[str, ...]) -> Target:
    if isinstance(of, Target):
        return Target(of.kind, tuple(map(int, of.ids)))
    if isinstance(of, str) and of in labels:
        return Target("label", (labels.index(of),))
    if isinstance(of, str):
        wanted = " or ".join(labels) if labels else "ids of tokens"
        raise RequestError("no such label", field="of", expected=wanted, got=repr(of))
    if _whole(of):
        return Target("logit", (int(of),))
    if isinstance(of, (tuple, list)) and len(of) == 2 and all(map(_whole, of)):
        return Target("difference", (int(of[0]), int(of[1])))
    raise RequestError("nothing to explain", field="of", expected="a token, two tokens, a label or a Target", got=of)


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def in_words(target: Target, labels: tuple[str, ...] = ()) -> str:
    """
    >>> in_words(Target("difference", (5, 7)))
    'logit of 5 minus logit of 7'
    """
    names = [repr(labels[i]) if labels else str(i) for i in target.ids]
    match target.kind:
        case "difference":
            score = "score" if labels else "logit"
            return f"{score} of {names[0]} minus {score} of {names[1]}"
        case "logprob":
            return f"log-probability of {names[0]}"
        case "label":
            return f"score of {names[0]}"
        case "logit":
            return f"logit of {names[0]}"


def measured(target: Target) -> Callable[[Tensor], Tensor]:
    """The function of scores that a target is. [..., vocab or label] → [...]"""

    def measure(scores: Tensor) -> Tensor:
        scores = scores.float() if scores.dtype.itemsize < 4 else scores
        if target.kind == "logprob":
            return scores.log_softmax(-1)[..., target.ids[0]]
        if target.kind == "difference":
            return scores[..., target.ids[0]] - scores[..., target.ids[1]]
        return scores[..., target.ids[0]]

    return measure


def place_in(length: int, position: Any, field: str = "position") -> int:
    """A position of a text, counted from the end where it is negative; None for the last.

    Raises:
        RequestError: there is none.
    """
    if position is None:
        return length - 1
    if not _whole(position) or not -length <= int(position) < length:
        raise RequestError("no such position", field=field, expected=f"{-length}…{length - 1}", got=position)
    return int(position) % length


def places_in(length: int, positions: Any, field: str = "positions") -> list[int]:
    """Places from the start, all by default; negative ones count from the end.

    Raises:
        RequestError: none, or no such.
    """
    if positions is None:
        return list(range(length))
    if not isinstance(positions, Sequence) or isinstance(positions, str) or not positions:
        raise RequestError("not a list of positions", field=field, expected="at least one, as a list", got=positions)
    # Within a list None is no place; by itself it is the last.
    return [place_in(length, -length - 1 if place is None else place, field) for place in positions]


def pooled_place(spec: ModelSpec, length: int, position: object) -> int | None:
    """The one position that a classifier of whole texts reads; None for all of them.

    Raises:
        RequestError: a position was asked for, and the answer is of the whole text.
    """
    pooler = spec.head.pooler if isinstance(spec.head, ClassifierSpec) else None
    if pooler is None:
        return place_in(length, position)
    if position is not None:
        raise RequestError("this model's scores are of a whole text", field="position", expected=None, got=position)
    return {"first": 0, "last": length - 1}.get(pooler.pool)


def row_of(ids: object, rows: int, field: str) -> list[int]:
    """Ids of one text.

    Raises:
        RequestError: none, or one outside the vocabulary.
    """
    found = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    if not isinstance(found, (list, tuple)):
        raise RequestError("not the ids of one text", field=field, expected="a list of ints", got=ids)
    return check_ids(found, rows, field)
