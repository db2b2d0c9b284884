"""The stream and the tables, read in the model's own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cutaway import inspection
from cutaway.formats.files import StrPath
from cutaway.generation.voice import Prompt
from cutaway.inside.ground import Ground, Target, Texts
from cutaway.inside.spoken import Word
from cutaway.inspection import (
    Lens,
    Neighbours,
    Plane,
    TunedLens,
)
from cutaway.inspection.listed import listed
from cutaway.inspection.steps import Progress


class Stream(Ground):
    """Lenses, and the tables that a text begins and ends with."""

    def lens(
        self,
        text: Prompt,
        at: Sequence[str] | None = None,
        *,
        follow: Word | Sequence[Word] = "final",
        positions: Sequence[int] | None = None,
        k: int = 5,
        target: Target = None,
        tuned: TunedLens | None = None,
        progress: Progress | bool | None = None,
    ) -> Lens:
        """What the model would say if it ended early: at each point of the stream, for each token of a text.

        Args:
            text: what is read.
            at: names or patterns of points (``"decoder.layers.*.attn.out"``); by default before each layer and the end.
            follow: the word whose rank and probability are told: the one said in the end (``"final"``), the one that
                comes next in the text (``"next"``), or a word, or one for each position.
            positions: only these; negative ones count from the end.
            k: how many of the best words. target: see the class.
            tuned: a lens that was trained for this model (Belrose et al. 2023): :meth:`train_lens`.
            progress: told of long texts: a function of (done, of), or True for a line.

        Raises:
            RequestError: a model without a head that scores tokens; a word that is several tokens.
        """
        one = self._says.read(text, target)
        goal: Any = follow
        if follow not in ("final", "next"):
            tokens = self._says.tokens(follow, "follow")
            goal = tokens[0] if len(tokens) == 1 else tokens
        kept = {"positions": positions, "k": k, "source": one.source, "tuned": tuned, "progress": progress}
        return inspection.lens(
            self._model,
            one.ids,
            at,
            target=goal,
            pieces=one.pieces,
            spell=self._says.spell,
            **kept,  # type: ignore[arg-type]
        )

    def train_lens(self, texts: Texts, *, targets: Sequence[Target] | None = None, **how: Any) -> TunedLens:
        """A tuned lens for this model; ``save(path)`` keeps it. For ``how`` see :func:`cutaway.inspection.train_lens`.

        Args:
            texts: some thousand tokens, as several texts. targets: of an encoder–decoder, one for each.
        """
        each = self._several(texts, targets)
        sources = None if each[0].source is None else [one.source or [] for one in each]
        return inspection.train_lens(self._model, [one.ids for one in each], sources=sources, **how)

    def load_lens(self, path: StrPath) -> TunedLens:
        """One that was saved; it must be of these weights.

        Raises:
            ResumeMismatch, FormatError: it is of others, or none at all.
        """
        return TunedLens.load(self._model, path)

    def neighbours(self, of: Word | Tensor, **more: Any) -> Neighbours:
        """The words nearest to a word, or to a vector, in the embedding table.

        Args:
            of: a word, or a vector. [d_model]
            **more: ``k``, ``by`` (cosine, dot, euclid), ``table`` (input, output, source), ``leave_out``.
        """
        token = of if isinstance(of, Tensor) else self._says.token(of, "of")
        return inspection.neighbours(self._model, token, spell=self._says.spell, **more)

    def analogy(self, a: Word, b: Word, c: Word, **more: Any) -> Neighbours:
        """What a − b + c is near: ``analogy(" king", " man", " woman")`` (Mikolov et al. 2013)."""
        tokens = self._says.tokens([a, b, c])
        return inspection.analogy(self._model, *tokens, spell=self._says.spell, **more)

    def plane(self, words: Sequence[Word], pairs: Sequence[tuple[Word, Word]] | None = None, **more: Any) -> Plane:
        """Words on a plane of the embedding table.

        Args:
            words: three or more.
            pairs: one or two, each an axis from its first word to its second; else what the words differ by most.
            **more: ``table``.
        """
        tokens = self._says.tokens(words)
        axes: Any = None
        if pairs is not None:
            every = [listed("pairs", pair, "two words") for pair in listed("pairs", pairs, "pairs of words")]
            axes = [self._says.tokens(pair, "pairs") for pair in every]
        return inspection.plane(self._model, tokens, pairs=axes, spell=self._says.spell, **more)
