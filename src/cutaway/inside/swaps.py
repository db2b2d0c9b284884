"""One run's pieces in another: patching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cutaway import inspection
from cutaway.errors import RequestError
from cutaway.generation.voice import Prompt
from cutaway.inside.ground import SIDES, Ground, Target, Texts
from cutaway.inside.spoken import Word
from cutaway.inspection import (
    Edit,
    Effect,
    Metric,
    PatchEstimates,
    Paths,
    Receiver,
    Sweep,
)
from cutaway.inspection.patching import Over
from cutaway.inspection.paths import END


class Swaps(Ground):
    """Two texts, and what comes of mixing their runs."""

    def effect(
        self,
        text: Prompt,
        edits: Mapping[str, Edit],
        *,
        k: int = 5,
        also: Sequence[Word] = (),
        position: int | None = None,
        target: Target = None,
    ) -> Effect:
        """What edits do to the answer: its likeliest words without them and with them.

        Args:
            text: what is read. target: see the class.
            edits: name or pattern → an edit: ``{"decoder.layers.3.attn.z": edits.zero(heads=5)}``.
            k: how many words of either answer. also: words to tell of in any case.
            position: of the token that answers; the last, or the only blank, by default.
        """
        one = self._says.read(text, target)
        place, words = self._place(one, position), self._says.tokens(also, "also") if also else []
        kept: Any = {"k": k, "also": words, "position": place, "source": one.source, "spell": self._says.spell}
        return inspection.effect(self._model, one.ids, edits, **kept)

    def patch_sweep(
        self, clean: Texts, corrupt: Texts, answer: Word | None = None, against: Word | None = None,
        over: Over = "position", *, metric: Metric | None = None, target: Target = None, **more: Any,
    ) -> Sweep:  # fmt: skip
        """Put what one text's run computed into another's, piece by piece (activation patching; Meng et al. 2022).

        Args:
            clean, corrupt: two texts of as many tokens, or two lists of such, that differ in what matters;
                ``align="end"`` counts places from the end of texts that are not.
            answer, against: the words whose scores' difference is measured; without either, what the model says to the
                clean and to the corrupt text; with ``answer`` alone, its log-probability.
            over: ``"position"`` (layer × position), ``"head"`` (layer × head) or ``"branch"``.
            metric: another question, instead of words. target: see the class.
            **more: ``at``, ``direction``, ``positions``, ``align``, ``stack``, ``answer_at``, ``batch``,
                ``progress``: see :func:`cutaway.inspection.patch_sweep`.

        Raises:
            RequestError: texts of different lengths, both shown with where they part; or that answer the same.
        """
        aligned = more.get("align") is not None
        sides, asked = self._pairs(clean, corrupt, answer, against, metric, target, more, aligned)
        first = sides[0][0]
        more |= {"pieces": first.pieces, "source_pieces": first.source_pieces, "spell": self._says.spell}
        if first.source is not None:
            more |= {f"{name}_sources": [one.source for one in side] for name, side in zip(SIDES, sides, strict=True)}
        one, two = ([heard.ids for heard in side] for side in sides)
        found = inspection.patch_sweep(self._model, one, two, asked, over, **more)
        if found.clean == found.corrupt:
            what = "both texts answer the same, so nothing is to be restored"
            raise RequestError(what, field="metric", got=found.clean, hint="Ask for other words, or take other texts.")
        return found

    def path_sweep(
        self, clean: Texts, corrupt: Texts, answer: Word | None = None, against: Word | None = None,
        receivers: Sequence[str | Receiver] = (END,), *, metric: Metric | None = None, **more: Any,
    ) -> Paths:  # fmt: skip
        """What every head tells some receivers directly, everything between held (Goldowsky-Dill et al. 2023).

        Args:
            clean, corrupt, answer, against, metric: as for :meth:`patch_sweep`.
            receivers: the ``"end"`` of the stream, or names such as ``"decoder.layers.9.attn.q"``; or a
                :class:`~cutaway.inspection.Receiver`, which has a head and a position.
            **more: ``direction``, ``position``, ``answer_at``, ``batch``, ``progress``.
        """
        if self._model.spec.source is not None:
            hint = "cutaway.inspection.path_sweep takes ids of sources and targets."
            raise RequestError("paths between two sources are not swept", field="clean", hint=hint)
        sides, asked = self._pairs(clean, corrupt, answer, against, metric, None, more)
        one, two = ([heard.ids for heard in side] for side in sides)
        return inspection.path_sweep(self._model, one, two, asked, receivers, spell=self._says.spell, **more)

    def attribution_patching(
        self,
        clean: Prompt,
        corrupt: Prompt,
        names: Sequence[str],
        of: Any = None,
        *,
        target: Target = None,
        **more: Any,
    ) -> PatchEstimates:
        """A first guess at :meth:`patch_sweep`, for every place of some quantities at once (Nanda 2023).

        Args:
            clean, corrupt: two texts of as many tokens. names: names or patterns of quantities.
            of: as for :meth:`decompose`; by default the difference of what the model says to either.
            target: see the class. **more: ``position``, ``types``.
        """
        sides = self._both(clean, corrupt, target)
        (one,), (two,) = sides
        if not callable(of):
            more["position"] = self._place(one, more.get("position"))
        goal = self._goal(one, of, more.get("position"))
        if of is None and (other := self._goal(two, None, more.get("position"))) != goal:
            goal = (goal, other)
        found = inspection.attribution_patching(
            self._model, one.ids, two.ids, goal, names, source=one.source, corrupt_source=two.source,
            pieces=two.pieces, source_pieces=two.source_pieces, **more,
        )  # fmt: skip
        return self._worded(found, goal)
