"""A model as a function of the vectors of its tokens: what is perturbed and derived by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, final

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection.reading import Text, answered, text_of, watching
from cutaway.inspection.slopes import check_slopes
from cutaway.inspection.target import Of, in_words, measured, pooled_place, target_of
from cutaway.models import Transformer
from cutaway.modules.embedding import Embedding
from cutaway.spec import ClassifierSpec

Measure: TypeAlias = Callable[[Tensor], Tensor]
"""Of what a model answers ([batch, …]), one number for each text. [batch]"""

Baseline: TypeAlias = int | Tensor | None
"""What a token is compared with: nothing (zeros), another token, or a vector. [d_model] or [query, d_model]"""

OWN, OTHER = "embed.tokens", "source_embed.tokens"


@final
class Question:
    """What is asked of a model, about one text.

    Args:
        model: in evaluation mode.
        text: what it reads.
        of: a target, or a function of the whole answer.
        position: where a target is; None for the last token, or for what a pooler reads.
    """

    def __init__(self, model: Transformer, text: Text, of: Of | Measure, position: int | None) -> None:
        self.model = model
        self.text = text
        if callable(of):
            if position is not None:
                what = "a function is given the answer at every position"
                raise RequestError(what, field="position", expected=None, got=position)
            self.position, self._measure, self.what = None, of, "a function of the answer"
        else:
            target = target_of(model.spec, of)
            self.position = pooled_place(model.spec, len(text.ids), position)
            self._measure = measured(target)
            self.what = in_words(target, model.spec.head.labels if isinstance(model.spec.head, ClassifierSpec) else ())

    def ask(self, swapped: Mapping[str, Tensor], watch: Mapping[str, Measure] | None = None) -> Tensor:
        """The number, for each row of what is put in the place of named quantities. [batch]

        Args:
            swapped: name → what the model goes on with. [batch, …]
            watch: name → what to do with other quantities on the way.
        """
        batch = len(next(iter(swapped.values()))) if swapped else 1
        seeing: dict[str, Measure] = dict(watch or {})
        seeing |= {name: partial(_instead, value) for name, value in swapped.items()}
        tap = watching(seeing, lambda name, value: seeing[name](value))
        # What is watched of the head is watched everywhere.
        entire = any(name == "logits" or name.startswith("head.") for name in seeing)
        answer = answered(self.model, self.text, tap, batch, None if entire else self.position)
        if entire and self.position is not None and answer.dim() == 3:
            answer = answer[:, self.position]
        found = self._measure(answer)
        if not isinstance(found, Tensor) or found.shape != (batch,):
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise RequestError("not one number for each text", field="of", expected=[batch], got=got)
        return found


@final
class Probe:
    """A question as a function of the vectors of the tokens, positions and types held.

    Args:
        model, ids, of, position, source, types: as for :func:`saliency`.
    """

    def __init__(
        self,
        model: Transformer,
        ids: Sequence[int],
        of: Of | Measure,
        position: int | None,
        source: Sequence[int] | None,
        types: Sequence[int] | None,
    ) -> None:
        self.text = text_of(model, ids, source, types)
        self.question = Question(model, self.text, of, position)
        self.model = model
        self.vectors = {OWN: self._rows(OWN, self.text.ids)}
        if self.text.source is not None:
            self.vectors[OTHER] = self._rows(OTHER, self.text.source)

    def __call__(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """The number, for rows of vectors. name → [batch, query, d_model], to [batch]"""
        return self.question.ask(vectors)

    def gradient(self, vectors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The numbers, and how each changes with its own row of vectors: [batch], name → [batch, query, d_model]"""
        check_slopes(self.model, "model")
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in vectors.items()}
            found = self(leaves)
            slopes = derived(found.sum(), [*leaves.values()])
        return found.detach(), dict(zip(leaves, slopes, strict=True))

    def baseline(self, of: Baseline) -> dict[str, Tensor]:
        """Vectors to compare with, in the shapes of those that are there.

        Raises:
            RequestError: no such token, or vectors of another shape.
        """
        made = {}
        for name, vectors in self.vectors.items():
            if of is None:
                made[name] = torch.zeros_like(vectors)
            elif isinstance(of, Tensor):
                try:
                    made[name] = of.to(vectors).expand_as(vectors)
                except RuntimeError:
                    shape = list(vectors.shape[1:])
                    raise RequestError(
                        "vectors of another shape", field="baseline", expected=shape, got=list(of.shape)
                    ) from None
            else:
                rows = self._size(name)
                if isinstance(of, bool) or not isinstance(of, int) or not 0 <= of < rows:
                    raise RequestError("no such token", field="baseline", expected=f"0…{rows - 1}", got=of)
                made[name] = self._rows(name, [of] * vectors.shape[1])
        return made

    def _rows(self, name: str, ids: Sequence[int]) -> Tensor:
        """Vectors of tokens as the embedding hands them on, scaled. [1, query, d_model]"""
        scope, embed = (OWN, self.model.embed) if name == OWN else (OTHER, self.model.source_embed)
        assert isinstance(embed, Embedding)
        kept: list[Tensor] = []
        tap = watching([scope], lambda _, value: kept.append(value) or value)  # type: ignore[func-returns-value]
        there = torch.tensor([[*ids]], device=self.model.device)
        table = self.model.embed.table if embed.tokens is None else None
        with torch.no_grad():
            embed(there, torch.arange(len(ids), device=there.device)[None], tap.at(scope.split(".")[0]), None, table)
        return kept[0].detach()

    def _size(self, name: str) -> int:
        spec = self.model.spec
        return (spec.source_vocab_size or spec.vocab_size) if name == OTHER else spec.vocab_size


def _instead(value: Tensor, _: Tensor) -> Tensor:
    return value


def derived(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """How a number changes with each tensor; zeros where it does not depend on it.

    Raises:
        RequestError: it depends on none of them by any path that has a slope.
    """
    if not total.requires_grad:
        what = "the number has no gradient: it does not depend on what was read, or was detached from it"
        raise RequestError(what, field="of", hint="A function of the answer must be made of tensor operations.")
    return [
        torch.zeros_like(leaf) if slope is None else slope
        for leaf, slope in zip(leaves, torch.autograd.grad(total, leaves, allow_unused=True), strict=True)
    ]
