"""Results that show themselves: in a terminal, in a notebook, as a text, and as one line where a prompt echoes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cutaway.inspection.figure import Figure

if TYPE_CHECKING:
    from cutaway.inspection.drawn.terminal import Drawing

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
