"""What heads do, and where in a run an answer is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutaway import inspection
from cutaway.errors import RequestError
from cutaway.generation.voice import Prompt
from cutaway.inside.ground import Branch, Ground, Target, Texts
from cutaway.inside.spoken import Word
from cutaway.inspection import (
    Ablation,
    Heads,
    HeadView,
    Pattern,
    Trace,
)
from cutaway.inspection.running import traced
from cutaway.inspection.steps import Progress


class Circuits(Ground):
    """Heads, and what comes of changing a run."""

    def trace(self, text: Prompt, *names: str, target: Target = None, **more: Any) -> Trace:
        """``model.trace`` of one text, whose ``target`` may be a text too.

        Args:
            text: what is read. names: names or patterns of quantities. target: see the class.
            **more: ``edits``, ``max_tokens`` and all else: see :meth:`cutaway.model.Model.trace`.
        """
        one = self._says.read(text, target)
        prompt, own = (one.ids, None) if one.source is None else (one.source, [one.ids])
        return traced(self._voice, prompt, names, target=own, **more)

    def attention(
        self, text: Prompt, branch: Branch, heads: int | Sequence[int] | None = None, *, target: Target = None
    ) -> Pattern:
        """Who reads whom: a branch's attention weights, which are no explanation.

        Args:
            text: what is read. target: see the class.
            branch: a layer, for its attention; or a name: ``"encoder.layers.0.attn"``, ``"decoder.layers.3.cross"``.
            heads: which; all by default.
        """
        one = self._says.read(text, target)
        chosen = [heads] if isinstance(heads, int) else heads
        return inspection.pattern(
            self._model, one.ids, self._branch(branch), chosen, source=one.source, pieces=one.pieces,
            source_pieces=one.source_pieces,
        )  # fmt: skip

    def repeated(self, length: int = 50, rows: int = 4, *, seed: int = 0) -> list[list[int]]:
        """Random ordinary tokens, then the same again (Olsson et al. 2022): ids of so many texts."""
        tokenizer = self._voice.tokenizer
        first = tokenizer.bos_id if tokenizer is not None and tokenizer.adds_bos else None
        return inspection.repeated(self._says.vocabulary(), length, rows, seed=seed, first=first)

    def head_scores(self, texts: Texts | None = None, *, target: Target = None) -> Heads:
        """What every head looks at: the token before, the same token, what came after it, the first token.

        Args:
            texts: of one length; by default :meth:`repeated` ones, which show induction. target: see the class.
        """
        if texts is None and self._model.spec.source is not None:
            rows = self.repeated()
            return inspection.head_scores(self._model, [[*self._voice.start(), *row] for row in rows], sources=rows)
        each = self._several(self.repeated() if texts is None else texts, None, target)
        if each[0].source is not None and len(each[0].ids) < 2:
            hint = "Give target=: what its decoder has written so far."
            raise RequestError("heads are scored on two tokens or more", field="target", got=target, hint=hint)
        sources = None if each[0].source is None else [one.source or [] for one in each]
        return inspection.head_scores(self._model, [one.ids for one in each], sources=sources)

    def copying_scores(self, *, progress: Progress | bool | None = None) -> Heads:
        """How far each head writes the token that it reads, from its weights alone (Elhage et al. 2021)."""
        return inspection.copying_scores(self._model, progress=progress)

    def head_looks_for(
        self, branch: Branch, head: int, words: Word | Sequence[Word], *, distance: int = 0, k: int = 10
    ) -> HeadView:
        """The QK view: what a head most looks for when it stands on each word, of the whole vocabulary.

        Args:
            branch: a layer, or a name. head: which. words: that it stands on.
            distance: how many tokens before it the key stands. k: how many of the best.
        """
        tokens = self._says.tokens(words)
        kept: Any = {"distance": distance, "k": k, "spell": self._says.spell}
        return inspection.head_looks_for(self._model, self._branch(branch), head, tokens, **kept)

    def head_writes(self, branch: Branch, head: int, words: Word | Sequence[Word], *, k: int = 10) -> HeadView:
        """The OV view: whose scores a head raises where it reads each word."""
        tokens = self._says.tokens(words)
        return inspection.head_writes(self._model, self._branch(branch), head, tokens, k=k, spell=self._says.spell)

    def ablation_sweep(self, texts: Texts | None = None, *, target: Target = None, **more: Any) -> Ablation:
        """The loss of the next token without each head, one at a time.

        Args:
            texts: of one length; by default :meth:`repeated` ones, of which only the repetition counts.
            target: see the class.
            **more: ``how``, ``first``, ``batch``, ``progress``: see :func:`cutaway.inspection.ablation_sweep`.
        """
        if texts is None:
            rows = self.repeated(30, 2)
            more.setdefault("first", len(rows[0]) - 30)
            return inspection.ablation_sweep(self._model, rows, **more)
        each = self._several(texts, None, target)
        sources = None if each[0].source is None else [one.source or [] for one in each]
        return inspection.ablation_sweep(self._model, [one.ids for one in each], sources=sources, **more)
