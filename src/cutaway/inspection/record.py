"""A tap that keeps what it was asked for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from cutaway.errors import RequestError

Edit: TypeAlias = Callable[[Tensor], Tensor]


class Recorder:
    """Keeps named quantities, pass by pass, and applies edits on the way.

    Args:
        names: full names to keep.
        edits: full name → what the computation goes on with instead, one edit after another. They come before keeping.
    """

    def __init__(self, names: Collection[str], edits: Mapping[str, Sequence[Edit]] | None = None) -> None:
        self._names = frozenset(names)
        self._edits = dict(edits or {})
        every = self._names | set(self._edits)
        self._scopes = {name[:i] for name in every for i, letter in enumerate(name) if letter == "."}
        self.kept: dict[str, list[Tensor]] = {name: [] for name in names}

    def at(self, scope: str) -> _Scope | None:
        """The tap of an inner scope, or None where nothing in it is wanted."""
        return _Scope(self, scope) if scope in self._scopes else None

    def wants(self, name: str) -> bool:
        """Whether this full name is kept or edited."""
        return name in self._names or name in self._edits

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Edit, keep, hand on.

        Raises:
            RequestError: an edit gives back something of another shape.
        """
        for edit in self._edits.get(name, ()):
            edited = edit(value)
            if not isinstance(edited, Tensor) or edited.shape != value.shape:
                got = list(edited.shape) if isinstance(edited, Tensor) else type(edited).__name__
                wanted = f"a tensor of shape {list(value.shape)}"
                raise RequestError("an edit gave back something else", field=name, expected=wanted, got=got)
            value = edited
        if name in self._names:
            self.kept[name].append(value)
        return value


class _Scope:
    """A recorder as one scope of the model sees it: with relative names."""

    def __init__(self, root: Recorder, prefix: str) -> None:
        self._root = root
        self._prefix = prefix

    def at(self, scope: str) -> _Scope | None:
        return self._root.at(f"{self._prefix}.{scope}")

    def wants(self, name: str) -> bool:
        return self._root.wants(f"{self._prefix}.{name}")

    def __call__(self, name: str, value: Tensor) -> Tensor:
        return self._root(f"{self._prefix}.{name}", value)
