"""What every part of :class:`cutaway.inside.Inside` stands on: texts become ids, words tokens, silence an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from cutaway import inspection
from cutaway.errors import RequestError
from cutaway.generation.voice import Prompt, Voice
from cutaway.inside.spoken import Heard, Spoken, Word
from cutaway.inspection import Metric
from cutaway.inspection.listed import listed
from cutaway.inspection.pairs import beside
from cutaway.inspection.target import place_in
from cutaway.models import Transformer
from cutaway.spec import ClassifierSpec, HeadSpec

Target: TypeAlias = str | Sequence[int] | None
Texts: TypeAlias = Prompt | Sequence[Prompt]
Branch: TypeAlias = int | str
"""A layer of the stack that ends at the head, for its attention; or a branch's name."""

SIDES = ("clean", "corrupt")


class Ground:
    """A model and its tokenizer, and what words mean to them.

    Args:
        voice: the model and its tokenizer.
    """

    def __init__(self, voice: Voice) -> None:
        self._voice, self._says = voice, Spoken(voice)

    @property
    def _model(self) -> Transformer:
        return self._voice.model

    def _several(self, texts: Texts, targets: Sequence[Target] | None, target: Target = None) -> list[Heard]:
        each = self._says.several(texts, target)
        if targets is None:
            return each
        if len(listed("targets", targets, "texts")) != len(each):
            raise RequestError("not a target for each text", field="targets", expected=len(each), got=len(targets))
        return [self._says.read(one.source or one.ids, own) for one, own in zip(each, targets, strict=True)]

    def _branch(self, branch: Branch) -> str:
        if isinstance(branch, bool) or not isinstance(branch, (int, str)):
            raise RequestError("not a branch", field="branch", expected="a layer's number, or a name", got=repr(branch))
        return branch if isinstance(branch, str) else f"{self._model.spec.main}.layers.{branch}.attn"

    def _goal(self, one: Heard, of: Any, position: int | None) -> Any:
        """What is explained; where there is no word, what the model says."""
        if isinstance(of, (tuple, list)):
            of = tuple(self._said(one, position) if word is None else word for word in of)
        return self._said(one, position) if of is None else self._says.goal(of)

    @torch.no_grad()
    def _said(self, one: Heard, position: int | None) -> int:
        """The likeliest token at a position, or the likeliest label.

        Raises:
            RequestError: the model scores nothing.
        """
        head = self._model.spec.head
        if not isinstance(head, (HeadSpec, ClassifierSpec)):
            hint = "Give a direction in the stream, or a function of what the model answers."
            raise RequestError("this model scores nothing: what is to be explained?", field="of", hint=hint)
        sources = None if one.source is None else [one.source]
        logits = inspection.trace(self._model, [one.ids], ("logits",), sources=sources)["logits"][0]
        if logits.dim() == 1:
            return int(logits.argmax())
        return int(logits[place_in(len(logits), position)].argmax())

    def _place(self, one: Heard, position: int | None) -> int | None:
        """The position that is meant: of a model that fills blanks, the only blank.

        Raises:
            RequestError: such a model has no last word, and there is not one blank.
        """
        spec, tokenizer = self._model.spec, self._voice.tokenizer
        if position is not None or spec.generates or not isinstance(spec.head, HeadSpec):
            return position
        blank = None if tokenizer is None else tokenizer.mask_id
        if one.ids.count(blank) == 1:  # type: ignore[arg-type]
            return one.ids.index(blank)  # type: ignore[arg-type]
        hint = "Put one [MASK] into the text, or give the position."
        raise RequestError("which token is asked about?", field="position", hint=hint)

    def _worded(self, found: Any, goal: Any) -> Any:
        words = self._says.worded(goal)
        return found if words is None else replace(found, what=words)

    def _both(self, clean: Texts, corrupt: Texts, target: Target, align: bool | None = None) -> list[list[Heard]]:
        """Texts in pairs of as many tokens; with ``align`` of any, and where that is False, it is named as a way."""
        sides = [self._says.several(some, target, name) for name, some in zip(SIDES, (clean, corrupt), strict=True)]
        for one, two in zip(*sides, strict=False):
            a, b = (x.ids if x.source is None else x.source for x in (one, two))
            if len(a) != len(b) and not align:
                left, right, where = beside(self._split(a), self._split(b))
                what = "a pair's texts must have as many tokens"
                way = "" if align is None else '; or count places from the end: align="end" (--align end)'
                hint = f"{where} Choose words that are as many tokens{way}."
                raise RequestError(what, field="corrupt", expected=left, got=right, hint=hint)
        return sides

    def _split(self, ids: list[int]) -> list[str]:
        tokenizer = self._voice.tokenizer
        return [*map(str, ids)] if tokenizer is None else [piece.text for piece in tokenizer.pieces(ids)]

    def _pairs(
        self, clean: Texts, corrupt: Texts, answer: Word | None, against: Word | None, metric: Metric | None,
        target: Target, more: dict[str, Any], align: bool | None = None,
    ) -> tuple[list[list[Heard]], Metric]:  # fmt: skip
        """Both sides, and the question; where it is asked goes into ``more``."""
        sides = self._both(clean, corrupt, target, align)
        if (at := self._place(sides[0][0], more.get("answer_at"))) is not None:
            more["answer_at"] = at
        if metric is not None:
            return sides, metric
        if answer is not None:
            first = self._says.token(answer, "answer")
            if against is None:
                return sides, inspection.log_probability(first)
            return sides, inspection.logit_difference(first, self._says.token(against, "against"))
        said = [[self._said(one, at) for one in side] for side in sides]
        if against is not None:
            raise RequestError("a word against none", field="answer", expected="the word that it is compared with")
        if said[0] == said[1]:
            what = "the model says the same to both texts: which words are asked about?"
            hint = 'Name two, as in answer=" Paris", against=" Rome" (--word " Paris" --word " Rome").'
            raise RequestError(what, field="answer", expected="a word, and perhaps one against it", hint=hint)
        return sides, inspection.logit_difference(*said)
