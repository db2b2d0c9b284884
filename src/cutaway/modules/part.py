"""Modules that note when they change, so that whoever knows what they are made of need not look each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_count = 0


def changes() -> int:
    """How often any part of any model was changed so far. While this stays, modules, parameters and hooks do too."""
    return _count


def note_change() -> None:
    """Say that a part may have changed."""
    global _count
    _count += 1


class Part(nn.Module):
    """A module of a model.

    It notes what goes through PyTorch's own methods: attributes set and deleted, modules, parameters and hooks
    registered, numbers moved or given another type. What is written to its private dictionaries is not noted.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        note_change()
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        note_change()
        super().__delattr__(name)

    def __setstate__(self, state: Any) -> None:
        note_change()
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """See :meth:`torch.nn.Module.add_module`."""
        note_change()
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """See :meth:`torch.nn.Module.register_parameter`."""
        note_change()
        super().register_parameter(name, param)

    def register_forward_hook(self, *hook: Any, **options: Any) -> RemovableHandle:
        """See :meth:`torch.nn.Module.register_forward_hook`."""
        note_change()
        return super().register_forward_hook(*hook, **options)

    def register_forward_pre_hook(self, *hook: Any, **options: Any) -> RemovableHandle:
        """See :meth:`torch.nn.Module.register_forward_pre_hook`."""
        note_change()
        return super().register_forward_pre_hook(*hook, **options)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        note_change()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class Identity(Part, nn.Identity):
    """Passes everything through."""


class Named(Part, nn.ModuleDict):
    """Modules by name."""

    def __delitem__(self, key: str) -> None:
        note_change()
        super().__delitem__(key)

    def clear(self) -> None:
        """See :meth:`torch.nn.ModuleDict.clear`."""
        note_change()
        super().clear()
