"""Every quantity inside a model, with its axes."""

from __future__ import annotations

import re
from typing import Any

from cutaway.cli.text import Cell, Look, loose, table
from cutaway.cli.tree import ranges
from cutaway.spec import ModelSpec
from cutaway.spec.names import axis_sizes, match, tap_names

_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")


def listed(spec: ModelSpec, pattern: str | None) -> list[dict[str, Any]]:
    """Each name with its axes and their sizes; a size that depends on the text is None.

    Raises:
        NameNotFound: the pattern matches nothing.
    """
    axes = tap_names(spec)
    wanted = list(axes) if pattern is None else match([loose(pattern)], axes)
    rows = []
    for name in wanted:
        sizes = axis_sizes(spec, name)
        rows.append({"name": name, "axes": list(axes[name]), "shape": [sizes.get(axis) for axis in axes[name]]})
    return rows


def folded(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], list[int]]]:
    """Rows with the layer's number written ``{i}`` where layers are alike: (name, the first row, layers)."""
    groups: dict[Any, tuple[str, dict[str, Any], list[int]]] = {}
    for row in rows:
        found = _LAYER.fullmatch(row["name"])
        name = f"{found[1]}{{i}}{found[3]}" if found else row["name"]
        key = (name, tuple(row["axes"]), tuple(row["shape"]))
        group = groups.setdefault(key, (name, row, []))
        if found:
            group[2].append(int(found[2]))
    return list(groups.values())


def draw(spec: ModelSpec, rows: list[dict[str, Any]], look: Look, *, every: bool) -> list[str]:
    """The names, folded over layers unless ``every``."""
    groups = [(row["name"], row, list[int]()) for row in rows] if every else folded(rows)
    whole = list(range(spec.n_layers))
    heading = "name" if every else f"name (i = {ranges(whole)})"
    lines: list[list[str | Cell]] = [[Cell(_ascii(heading, look), "dim"), Cell("axes", "dim"), Cell("shape", "dim")]]
    for name, row, layers in groups:
        shape = ", ".join(
            axis if size is None else str(size) for axis, size in zip(row["axes"], row["shape"], strict=True)
        )
        label = name if not layers or layers == whole else f"{name}  i = {ranges(layers)}"
        head, _, tail = label.rpartition(".")
        lines.append(
            [
                _ascii(f"{head}.{tail}" if head else tail, look),
                Cell(" ".join(row["axes"]), "dim"),
                Cell(f"[{shape}]", "cyan"),
            ]
        )
    kept = [0, 1, 2] if look.width >= 92 else [0, 2]
    picked = [[line[i] for i in kept] for line in lines]
    return table(picked, "l" * len(kept), look, gives=0)


def _ascii(text: str, look: Look) -> str:
    return text.replace("–", "-") if look.plain else text
