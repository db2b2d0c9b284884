"""Inside: what ``model.inside`` is. Texts and words become ids here; the rooms before do the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from cutaway import inspection
from cutaway.generation.voice import Prompt, Voice
from cutaway.inside.circuits import Circuits
from cutaway.inside.credit import Credit
from cutaway.inside.ground import Target
from cutaway.inside.stream import Stream
from cutaway.inside.swaps import Swaps
from cutaway.inspection import Comparison
from cutaway.models import Transformer

__all__ = ["Inside", "Opened"]

M = TypeVar("M")


@runtime_checkable
class Opened(Protocol):
    """A model that can be looked into."""

    @property
    def inside(self) -> Inside[Any]:
        """What looks into it."""
        ...


class Inside(Stream, Credit, Circuits, Swaps, Generic[M]):
    """Looking into a model, in its own words: ``model.inside.lens("The Eiffel Tower is in")``.

    Everything takes a text, messages or ids. Of an encoder–decoder they are the source, and ``target`` is what its
    decoder reads after its start token (nothing by default). A word (``" Paris"``, mind the space) must be one token:
    one that is not raises a :class:`~cutaway.errors.RequestError` that shows how it splits; an id will do. Results
    print as figures, show as such in a notebook, and have ``as_dict()``.

    The functions behind it, which take ids, are in :mod:`cutaway.inspection`, with all their arguments.

    Args:
        voice: the model and its tokenizer.
        again: makes a model of rewritten weights, with the same tokenizer.
    """

    def __init__(self, voice: Voice, again: Callable[[Transformer], M]) -> None:
        super().__init__(voice)
        self._again = again

    def __repr__(self) -> str:
        names = [name for name in dir(self) if not name.startswith("_")]
        return f"Inside({self._model.spec.family}): {', '.join(names)}"

    def compare(self, text: Prompt, other: Prompt | Opened, *, target: Target = None, **more: Any) -> Comparison:
        """Two runs side by side: the first quantity that differs, and by how much.

        Args:
            text: what is read.
            other: another model, which reads the same with its own tokenizer; or another text.
            target: see the class.
            **more: ``names``, ``tolerance``, ``align``, ``progress``: see :func:`cutaway.inspection.compare`.
        """
        one = self._says.read(text, target)
        if isinstance(other, Opened):
            right = other.inside
            two = right._says.read(text, target, "other") if isinstance(text, str) else one
            model = right._model
        else:
            model, two = self._model, self._says.read(other, target, "other")
        return inspection.compare(
            self._model, model, one.ids, two.ids, source=one.source, other_source=two.source, pieces=one.pieces, **more
        )

    def fold_norms(self, *, partly: bool = False) -> M:
        """A new model whose norms only divide; its logits are the same. See :func:`cutaway.inspection.fold_norms`.

        Raises:
            RequestError: a norm that nothing after it can take; ``partly`` leaves those.
        """
        return self._again(inspection.fold_norms(self._model, partly=partly).model)

    def centre_writes(self) -> M:
        """A new model that writes nothing along all channels alike; its logits are the same.

        Raises:
            RequestError: something reads the stream that does not take its mean away (an RMSNorm).
        """
        return self._again(inspection.centre_writes(self._model).model)

    def centre_unembedding(self) -> M:
        """A new model whose logits have mean zero; its log-probabilities are the same.

        Raises:
            RequestError: the model scores no tokens, or caps its logits.
        """
        return self._again(inspection.centre_unembedding(self._model).model)
