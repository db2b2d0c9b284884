"""What a score is made of, and which tokens it hangs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from cutaway import inspection
from cutaway.generation.voice import Prompt
from cutaway.inside.ground import Ground, Target
from cutaway.inspection import (
    Attribution,
    Decomposition,
    Neurons,
)


class Credit(Ground):
    """Decomposition, neurons, and attribution to tokens."""

    def decompose(
        self, text: Prompt, of: Any = None, *, position: int | None = None, target: Target = None, **more: Any
    ) -> Decomposition:
        """A score as the exact sum of what every head, feed-forward network and bias adds to it (Elhage et al. 2021).

        Args:
            text: what is read.
            of: a word; a pair of words, for the difference of their scores; a label; a direction in the stream. By
                default what the model says in the end.
            position: the token at which it is said; the last by default. target: see the class.
            **more: ``at``, ``neurons``, ``sources``, ``types``: see :func:`cutaway.inspection.decompose`.

        Raises:
            RequestError: the stream is no sum (a norm stands on it), or the score no linear function of it.
        """
        one = self._says.read(text, target)
        position = self._place(one, position)
        goal = self._goal(one, of, position)
        found = inspection.decompose(
            self._model, one.ids, goal, position=position, source=one.source, pieces=one.pieces,
            source_pieces=one.source_pieces, **more,
        )  # fmt: skip
        return found if isinstance(goal, Tensor) else self._worded(found, goal)

    def neurons(
        self, text: Prompt, of: Any = None, *, k: int = 10, position: int | None = None,
        layers: Sequence[int] | None = None, target: Target = None, by_size: bool = False,
    ) -> Neurons:  # fmt: skip
        """The neurons that add most to a score, or (``by_size``) that write most to the stream.

        Args:
            text: what is read.
            of: as for :meth:`decompose`. k: how many. position: of which token. layers: only these.
            target: see the class.
            by_size: by the length of what each writes: for any model, whatever it scores.
        """
        one = self._says.read(text, target)
        position = position if by_size else self._place(one, position)
        goal = None if by_size else self._goal(one, of, position)
        return inspection.neurons(
            self._model, one.ids, goal, k=k, position=position, layers=layers, source=one.source, pieces=one.pieces,
            spell=self._says.spell,
        )  # fmt: skip

    def saliency(self, text: Prompt, of: Any = None, *, target: Target = None, **more: Any) -> Attribution:
        """How steep a score is in each token's vector (Simonyan et al. 2014): see :func:`cutaway.inspection.saliency`.

        Args:
            text: what is read. target: see the class.
            of: as for :meth:`decompose`; or a function of all that the model answers ([1, query, vocab] → [1]).
            **more: ``times_input``, ``position``, ``types``.
        """
        return self._attributed(inspection.saliency, text, of, target, more)

    def integrated_gradients(self, text: Prompt, of: Any = None, *, target: Target = None, **more: Any) -> Attribution:
        """The same summed on the way from a baseline, so that it adds up (Sundararajan et al. 2017).

        Args:
            text, of, target: as for :meth:`saliency`.
            **more: ``baseline`` (a word, an id, a vector; zeros by default), ``steps``, ``position``, ``progress``.
        """
        return self._attributed(inspection.integrated_gradients, text, of, target, more)

    def occlusion(self, text: Prompt, of: Any = None, *, target: Target = None, **more: Any) -> Attribution:
        """What a score loses when each token is taken out (Zeiler & Fergus 2014).

        Args:
            text, of, target: as for :meth:`saliency`.
            **more: ``baseline``, ``window``, ``position``, ``progress``.
        """
        return self._attributed(inspection.occlusion, text, of, target, more)

    def _attributed(
        self, method: Callable[..., Attribution], text: Prompt, of: Any, target: Target, more: dict[str, Any]
    ) -> Attribution:
        one = self._says.read(text, target)
        if not callable(of):
            more["position"] = self._place(one, more.get("position"))
        goal = self._goal(one, of, more.get("position"))
        if isinstance(more.get("baseline"), str):
            more["baseline"] = self._says.token(more["baseline"], "baseline")
        found = method(
            self._model, one.ids, goal, source=one.source, pieces=one.pieces, source_pieces=one.source_pieces, **more
        )
        return self._worded(found, goal)
