"""A tap that keeps what it was asked for, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from cutaway.errors import CutawayError, RequestError
from cutaway.inspection.change import Change, Changed, Edit
from cutaway.inspection.listed import names_listed
from cutaway.inspection.where import Place
from cutaway.spec import ModelSpec
from cutaway.spec.names import match, tap_names


class Enough(Exception):
    """All that was wanted of a pass has been seen."""


class Recorder:
    """Keeps named quantities, pass by pass, and applies edits on the way.

    A training step takes one too: ``model(ids, positions, tap=recorder)`` keeps what is part of the graph, and with
    ``grads`` each has its ``.grad`` after ``loss.backward()``. Let go of the recorder, or call :meth:`clear`, before
    the next step.

    Args:
        names: full names to keep.
        edits: full name → what the computation goes on with instead, one edit after another. They come before keeping.
        axes: name → axis words, for edits that are told their place: see :meth:`of`.
        grads: keep the gradients of what is kept.
        stop: end each pass, by raising :class:`Enough`, when all that is to be kept was seen.
        leaves: what is kept and has no gradient, since no weight before it learns, has one from there on.

    Attributes:
        kept: name → a tensor for each pass.
        positions: name → where their tokens stand, −1 for a pad. [batch, query] for each pass
    """

    def __init__(
        self,
        names: Collection[str],
        edits: Mapping[str, Sequence[Edit]] | None = None,
        axes: Mapping[str, tuple[str, ...]] | None = None,
        grads: bool = False,
        stop: bool = False,
        leaves: bool = False,
    ) -> None:
        self._names = dict.fromkeys(names)  # a set that keeps their order
        self._edits = dict(edits or {})
        every = {**self._names, **self._edits}
        self._scopes = {name[:i] for name in every for i, letter in enumerate(name) if letter == "."}
        self._axes = axes or {}
        self._grads, self._stop, self._leaves = grads, stop, leaves
        self._at = {False: torch.empty(0, 0), True: torch.empty(0, 0)}  # of the text's tokens, and of the source's
        self._left = set(self._names)  # to be seen before a pass may end
        self._reached: set[str] = set()  # names whose edits were called
        self._met: dict[tuple[str, int], set[tuple[str, int, int]]] = {}
        self.kept: dict[str, list[Tensor]] = {}
        self.positions: dict[str, list[Tensor]] = {}
        self.clear()

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *names: str,
        edits: Mapping[str, Edit] | None = None,
        grads: bool = False,
        stop: bool = False,
        leaves: bool = False,
    ) -> Self:
        """Of a model's quantities that names or patterns match.

        Raises:
            NameNotFound: a pattern matches nothing.
            RequestError: an edit that cannot be called with a tensor.
        """
        axes = tap_names(spec)
        by_name: dict[str, list[Edit]] = {}
        for pattern, edit in (edits or {}).items():
            _check_call(pattern, edit)
            for name in match([pattern], axes):
                by_name.setdefault(name, []).append(edit)
        return cls(match(names_listed("names", names), axes), by_name, axes, grads, stop, leaves)

    def clear(self) -> None:
        """Let go of what was kept."""
        self.kept = {name: [] for name in self._names}
        self.positions = {name: [] for name in self._names}

    def begin(self, positions: Tensor, of_source: bool = False) -> None:
        """A pass begins."""
        self._at[of_source] = positions
        if not of_source:
            self._left = {name for name in self._names if not (self._of_source(name) and self.kept[name])}

    def at(self, scope: str) -> _Scope | None:
        """The tap of an inner scope, or None where nothing in it is wanted."""
        return _Scope(self, scope) if scope in self._scopes else None

    def wants(self, name: str) -> bool:
        """Whether this full name is kept or edited."""
        return name in self._names or name in self._edits

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Edit, keep, hand on.

        Raises:
            RequestError: an edit gives back something of another shape or kind, or takes hold of what is not there.
            Enough: this was the last that was wanted.
        """
        if name in self._edits:
            value = self._edited(name, value)
        if name in self._names:
            if self._leaves and not value.requires_grad and value.is_floating_point():
                value = value.detach().requires_grad_()
            self.kept[name].append(self._whole(value))
            self.positions[name].append(self._at[self._of_source(name)])
            self._left.discard(name)
        if self._stop and not self._left:
            raise Enough
        return value

    def check(self) -> None:
        """Refuse edits that took hold of nothing, in all passes so far.

        Raises:
            RequestError: a position that no text reached, or a quantity that was not computed.
        """
        for name, edits in self._edits.items():
            if name not in self._reached:
                hint = "It lies before the start or after the stop." if self._stop else None
                raise RequestError("an edit of what was not computed", field=f"edits/{name}", hint=hint)
            for i, edit in enumerate(edits):
                if isinstance(edit, Change) and (lost := edit.where.unmet(self._met.get((name, i), set()))):
                    what = f"no text reached these {lost[0]}"
                    raise RequestError(what, field=f"edits/{name}", got=lost[1], hint="The edit changed nothing there.")

    def _of_source(self, name: str) -> bool:
        """Whether a quantity is computed of a source's tokens, once."""
        axes = self._axes.get(name, ())
        return "source" in axes and "query" not in axes

    def _edited(self, name: str, value: Tensor) -> Tensor:
        self._reached.add(name)
        place = Place(name, self._axes.get(name, ()), self._at[self._of_source(name)])
        for i, edit in enumerate(self._edits[name]):
            if isinstance(edit, Change):  # which writes on nothing
                edited = edit.change(value, place)
                self._met.setdefault((name, i), set()).update(edit.where.met(value, place))
            else:
                edited = _made(edit, name, value.clone(), place)
            _check_kind(name, value, edited)
            value = edited
        return value

    def _whole(self, value: Tensor) -> Tensor:
        if value.requires_grad:
            if self._grads:
                value.retain_grad()
            return value
        # Part of something larger would keep all of that.
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _made(edit: Edit, name: str, value: Tensor, place: Place) -> Tensor:
    """What a stranger's edit makes of a copy: it may write on it, and what was kept before stays as it was.

    Raises:
        RequestError: it ended as an iterator does, which would end whatever runs it.
    """
    try:
        return edit.change(value, place) if isinstance(edit, Changed) else edit(value)
    except StopIteration as error:
        raise RequestError("an edit raised StopIteration", field=f"edits/{name}") from error
    except Exception as error:
        if not isinstance(error, CutawayError):
            error.add_note(f"In the edit of {name}.")
        raise


def _check_call(name: str, edit: Edit) -> None:
    """Refuse a function that cannot be called with one tensor, before anything is run.

    Raises:
        RequestError: it takes other arguments.
    """
    call = edit.change if isinstance(edit, Changed) else edit
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # written in C, which does not say
        return
    try:
        signature.bind(*[None] * (1 + isinstance(edit, Changed)))
    except TypeError as error:
        wanted = "a tensor and a Place" if isinstance(edit, Changed) else "one tensor"
        what = "an edit takes other arguments"
        raise RequestError(what, field=f"edits/{name}", expected=wanted, got=str(signature)) from error


def _check_kind(name: str, value: Tensor, edited: object) -> None:
    """What comes after computes with the numbers as they are."""
    if not isinstance(edited, Tensor) or edited.shape != value.shape:
        got = list(edited.shape) if isinstance(edited, Tensor) else type(edited).__name__
        wanted = f"a tensor of shape {list(value.shape)}"
        raise RequestError("an edit gave back something else", field=name, expected=wanted, got=got)
    if edited.layout != value.layout:
        wanted, got = str(value.layout), str(edited.layout)
        hint = "End it with .to_dense()."
        raise RequestError("an edit gave back another layout", field=name, expected=wanted, got=got, hint=hint)
    kinds = [f"{t.dtype} on {t.device}" for t in (value, edited)]
    if kinds[0] != kinds[1]:
        hint = "End it with .to(value)."
        raise RequestError("an edit gave back other numbers", field=name, expected=kinds[0], got=kinds[1], hint=hint)


class _Scope:
    """A recorder as one scope of the model sees it: with relative names."""

    def __init__(self, root: Recorder, prefix: str) -> None:
        self._root = root
        self._prefix = prefix

    def begin(self, positions: Tensor, of_source: bool = False) -> None:
        self._root.begin(positions, of_source)

    def at(self, scope: str) -> _Scope | None:
        return self._root.at(f"{self._prefix}.{scope}")

    def wants(self, name: str) -> bool:
        return self._root.wants(f"{self._prefix}.{name}")

    def __call__(self, name: str, value: Tensor) -> Tensor:
        return self._root(f"{self._prefix}.{name}", value)
