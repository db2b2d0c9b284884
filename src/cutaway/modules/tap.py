"""How an intermediate quantity is handed out while it is computed."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Tap(Protocol):
    """Reads or edits named quantities of one scope of the model.

    Modules take ``tap: Tap | None``; None costs one comparison and nothing in a compiled graph.
    Names are relative: a block asks for ``"q"``, and only the tap knows which layer's.
    """

    def begin(self, positions: Tensor, of_source: bool = False) -> None:
        """A pass begins: where its tokens stand, −1 for a pad. [batch, query]

        Args:
            positions: of the text, or of the source that an encoder–decoder's encoder reads.
            of_source: which of the two.
        """
        ...

    def at(self, scope: str) -> Tap | None:
        """The tap for an inner scope, or None where nothing in it is wanted."""
        ...

    def wants(self, name: str) -> bool:
        """Whether this quantity is wanted: some are computed, and blocks are looked into, only then."""
        ...

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Take note of a quantity and give back what the computation goes on with."""
        ...
