"""Modules that note when they change, so that whoever knows what they are made of need not look each time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_numbers = count(1)  # each is given once, whichever thread asks
_count = 0


def changes() -> int:
    """How often any part of any model was changed so far. While this stays, modules, parameters and hooks do too."""
    return _count


def note_change() -> None:
    """Say that a part may have changed."""
    global _count
    _count = next(_numbers)


def _methods(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if callable(value) or isinstance(value, property)}


class PartType(type):
    """The class of parts' classes: it notes what is put in place of their methods."""

    def __init__(cls, name: str, bases: tuple[type, ...], own: dict[str, Any]) -> None:
        super().__init__(name, bases, own)
        type.__setattr__(cls, "_written", _methods(cls))
        type.__setattr__(cls, "_compared", (-1, False))

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        note_change()

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        note_change()

    @property
    def as_written(cls) -> bool:
        """Whether its methods, and those of the parts that it is made of, are those of its source."""
        when, found = vars(cls)["_compared"]
        if when != (now := _count):
            found = all(_methods(kind) == vars(kind)["_written"] for kind in cls.__mro__ if type(kind) is PartType)
            type.__setattr__(cls, "_compared", (now, found))
        return bool(found)


class Part(nn.Module, metaclass=PartType):
    """A module of a model.

    It notes what goes through PyTorch's own methods: attributes set and deleted, modules, parameters and hooks
    registered, numbers moved or given another type. What is written to its private dictionaries is not noted.
    """

    # Noted when it is done: whoever looks meanwhile, in another thread, is to look again.
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        note_change()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        note_change()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        note_change()

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """See :meth:`torch.nn.Module.add_module`."""
        super().add_module(name, module)
        note_change()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See :meth:`torch.nn.Module.register_parameter`."""
        super().register_parameter(name, param)
        note_change()

    def register_forward_hook(self, *hook: Any, **options: Any) -> RemovableHandle:
        """See :meth:`torch.nn.Module.register_forward_hook`."""
        handle = super().register_forward_hook(*hook, **options)
        note_change()
        return handle

    def register_forward_pre_hook(self, *hook: Any, **options: Any) -> RemovableHandle:
        """See :meth:`torch.nn.Module.register_forward_pre_hook`."""
        handle = super().register_forward_pre_hook(*hook, **options)
        note_change()
        return handle

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        try:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            note_change()


class Identity(Part, nn.Identity):
    """Passes everything through."""


class Named(Part, nn.ModuleDict):
    """Modules by name."""

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        note_change()

    def clear(self) -> None:
        """See :meth:`torch.nn.ModuleDict.clear`."""
        super().clear()
        note_change()


def is_plain(module: nn.Module) -> bool:
    """Whether a call does what its class's source says: nobody put a function in place of one of its methods."""
    kind: type = type(module)
    if not isinstance(kind, PartType) or not kind.as_written:
        return False
    own = [name for name, value in module.__dict__.items() if callable(value)]
    return not any(name in vars(base) for name in own for base in kind.__mro__)
