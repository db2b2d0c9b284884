"""Results that show themselves: in a terminal, in a notebook, as a text, and as one line where a prompt echoes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from cutaway.inspection.figure import Figure

if TYPE_CHECKING:
    from cutaway.inspection.drawn.terminal import Drawing

UNSAID = "null: there is nothing, or no finite number."
Told = TypeVar("Told")
FEW, LONG = 4, 40  # items, and letters, that a repr still says


class Shown:
    """What has a figure can be looked at: ``print(result)``, ``rich.print(result)``, or as the last of a cell."""

    __slots__ = ()

    def figure(self) -> Figure:
        """What there is to see."""
        raise NotImplementedError

    def __rich__(self) -> Drawing:
        from cutaway.inspection.drawn.terminal import Drawing

        return Drawing(self.figure())

    def _repr_html_(self) -> str:
        from cutaway.inspection.drawn.page import fragment

        return fragment(self.figure())

    def __str__(self) -> str:
        from cutaway.inspection.drawn.terminal import plain_text

        return plain_text(self.figure())

    def __repr__(self) -> str:
        return brief(self)


def for_json(tell: Callable[[Told], dict[str, Any]]) -> Callable[[Told], dict[str, Any]]:
    """An ``as_dict`` whose numbers JSON has: None for any that is not finite, and a note where there is one."""

    @wraps(tell)
    def told(self: Told) -> dict[str, Any]:
        found, lacks = _finite(tell(self))
        return {**found, "notes": [*found.get("notes", ()), UNSAID]} if lacks else found

    return told


def _finite(value: Any) -> tuple[Any, bool]:
    """The same without what is not finite, and whether a number is None in it: of some numbers, or for that reason."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, True
    if isinstance(value, Mapping):
        named = {key: _finite(item) for key, item in value.items()}
        return {key: item for key, (item, _) in named.items()}, any(lacks for _, lacks in named.values())
    if isinstance(value, (list, tuple)):
        each = [_finite(item) for item in value]
        lacks = any(lacks for _, lacks in each) or (None in value and any(isinstance(x, float) for x in value))
        return [item for item, _ in each], lacks
    return value, False


def brief(value: object) -> str:
    """A dataclass in a line: of tensors their shapes, of long lists their lengths."""
    if not is_dataclass(value):
        return object.__repr__(value)
    said = [f"{one.name}={_short(getattr(value, one.name))}" for one in fields(value) if one.repr]
    return f"{type(value).__name__}({', '.join(said)})"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"<{'×'.join(map(str, value.shape))}>"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return repr(value if len(value) <= LONG else value[: LONG - 1] + "…")
    if isinstance(value, Mapping):
        return f"{{{len(value)} by name}}"
    if isinstance(value, (tuple, list)):
        if len(value) > FEW or any(isinstance(item, (tuple, list)) or is_dataclass(item) for item in value):
            return f"({len(value)} items)"
        return f"({', '.join(map(_short, value))})"
    return type(value).__name__ if isinstance(value, Mapping) or callable(value) else repr(value)
