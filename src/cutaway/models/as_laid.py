"""What a block's pointers were taken from, and whether all of it still is as it was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import is_
from typing import Any

from torch import Tensor, nn

from cutaway.modules.part import changes, is_plain


@dataclass(slots=True)
class Weights:
    """Weights as they lay: a list for each thing about them, for they are looked through in every pass.

    Attributes:
        all, owners, names: each weight, whose parameter it was, and by which name.
        movable, addresses, counts: those whose numbers may come to lie elsewhere, where they were, and how many.
        parts, were: what each module is made of, and was made of.
        modules, made: each module that is called, and what it was: see :func:`made_of`.
        own, sizes: what is set on each of them, and how much was.
        hooks: what is called with them, empty while nobody looks.
        compared: which change was the last when ``made`` was compared.
        noted: and when all this was last looked through.
    """

    all: list[nn.Parameter | None] = field(default_factory=list)
    owners: list[dict[str, nn.Parameter | None]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    movable: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    parts: list[dict[str, nn.Module | None]] = field(default_factory=list)
    were: list[dict[str, nn.Module | None]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    made: list[tuple[object, ...]] = field(default_factory=list)
    own: list[dict[str, object]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    hooks: list[dict[int, Any]] = field(default_factory=list)
    compared: int = -1
    noted: int = -1

    def add(self, module: nn.Module) -> None:
        """Note a module that is called."""
        self.modules.append(module)
        self.made.append(made_of(module))
        self.own.append(module.__dict__)
        self.sizes.append(len(module.__dict__))

    def current(self) -> bool:
        """Whether all are where they were, in the same modules, and there are any."""
        held = all(map(is_, map(dict.get, self.owners, self.names), self.all))
        same = held and self.parts == self.were and [*map(len, self.own)] == self.sizes
        return same and bool(self.all) and self._as_made() and self._in_place() and self._side_by_side()

    def untouched(self) -> bool:
        """Whether :meth:`current` was so with no hooks, and nothing was noted since: what a single token can afford."""
        if self.noted == changes():
            return self._in_place()
        now = changes()
        if not self.current() or any(self.hooks):
            return False
        self.noted = now
        return True

    def _as_made(self) -> bool:
        """Whether the modules are what they were: looked at where anything was noted."""
        now = changes()
        if self.compared != now:
            if [*map(made_of, self.modules)] != self.made or not all(map(is_plain, self.modules)):
                return False
            self.compared = now
        return True

    def _side_by_side(self) -> bool:
        """Whether there are as many numbers: a slice begins at the address of the whole."""
        return [*map(Tensor.numel, self.movable)] == self.counts and all(map(Tensor.is_contiguous, self.movable))

    def _in_place(self) -> bool:
        return [*map(Tensor.data_ptr, self.movable)] == self.addresses


_LISTS = [one.name for one in fields(Weights) if one.type.startswith("list")]


def joined(parts: Iterable[Weights]) -> Weights:
    """All of several."""
    out = Weights()
    for part in parts:
        for name in _LISTS:
            getattr(out, name).extend(getattr(part, name))
    return out


def made_of(module: nn.Module) -> tuple[object, ...]:
    """What a module is beside its weights and parts: class, spec, how it multiplies, what is set on it, and to None."""
    own = module.__dict__
    return type(module), own.get("spec"), own.get("product"), [(name, value is None) for name, value in own.items()]
