"""Every quantity inside a model, with its axes and a few words on what it is."""

from __future__ import annotations

import re
from typing import Any

from cutaway.cli.text import Cell, Look, loose, table, width
from cutaway.cli.tree import ranges
from cutaway.spec import ClassifierSpec, ModelSpec
from cutaway.spec.names import axis_sizes, match, tap_names

_LAYER = re.compile(r"(\w+\.layers\.)(\d+)(\..+)")
_LEAST = 12  # columns that the words need to be worth showing

# The last parts of a name → what it is, in so few words that 80 columns have room; the most parts win.
_WORDS = {
    "embed.tokens": "token vectors",
    "embed.positions": "position vectors",
    "embed.types": "type vectors",
    "source_embed.tokens": "source's tokens",
    "source_embed.positions": "source's positions",
    "source_embed.norm_scale": "the norm's factor",
    "source_embed.out": "encoder's input",
    "encoder.norm.norm_scale": "the norm's factor",
    "encoder.norm.out": "what was read",
    "cross.k": "source's keys",
    "cross.v": "source's values",
    "head.pooled": "one vector a text",
    "head.transform": "before its scores",
    "embed.norm_scale": "the norm's factor",
    "embed.out": "layer 0's input",
    "resid_in": "stream, entering",
    "norm_scale": "the norm's factor",
    "in": "the branch's input",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "q_rot": "queries, turned",
    "k_rot": "keys, turned",
    "scores": "query·key, masked",
    "weights": "who reads whom",
    "z": "values, mixed",
    "head_out": "each head's share",
    "up": "neurons before act",
    "gate": "gate before act",
    "act": "neurons after act",
    "router_logits": "scores of experts",
    "router_weights": "shares of experts",
    "experts": "experts' answers",
    "body": "branch's answer",
    "out": "added to stream",
    "resid": "stream, leaving",
    "decoder.norm.norm_scale": "the norm's factor",
    "decoder.norm.out": "the head's input",
    "logits": "next-token scores",
}


def meaning(name: str, spec: ModelSpec | None = None) -> str:
    """What a quantity is, in a few words; empty where nobody wrote any.

    Args:
        name: of the quantity.
        spec: whose it is; without, of a decoder.

    >>> meaning("decoder.layers.3.attn.weights"), meaning("decoder.norm.out")
    ('who reads whom', "the head's input")
    """
    parts = name.split(".")
    if spec is not None and name == "logits" and not spec.generates:
        return "scores of labels" if isinstance(spec.head, ClassifierSpec) else "scores of tokens"
    if spec is not None and name == f"{spec.main}.norm.out":
        return "what comes out" if spec.head is None else "the head's input"
    return next((words for i in range(len(parts)) if (words := _WORDS.get(".".join(parts[i:])))), "")


def listed(spec: ModelSpec, pattern: str | None) -> list[dict[str, Any]]:
    """Each name with its axes, their sizes and what it is; a size that depends on the text is None.

    Raises:
        NameNotFound: the pattern matches nothing.
    """
    axes = tap_names(spec)
    wanted = list(axes) if pattern is None else match([loose(pattern)], axes)
    rows = []
    for name in wanted:
        sizes = axis_sizes(spec, name)
        shape = [sizes.get(axis) for axis in axes[name]]
        rows.append({"name": name, "axes": list(axes[name]), "shape": shape, "meaning": meaning(name, spec)})
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
    whole = {name: list(range(len(stack.layers))) for name, stack in spec.stacks.items()}
    alike = len({len(layers) for layers in whole.values()}) == 1
    found = [f"{ranges(layers)} in the {name}" for name, layers in whole.items()]
    above = [] if every or alike else [look.paint(_ascii(f"i = {', '.join(found)}", look), "dim")]
    heading = f"name (i = {ranges(next(iter(whole.values())))})" if alike and not every else "name"
    lines: list[list[Cell]] = [[Cell(_ascii(w, look), "dim") for w in (heading, "axes", "shape", "is", _INNER)]]
    for name, row, layers in groups:
        sizes = [axis if size is None else str(size) for axis, size in zip(row["axes"], row["shape"], strict=True)]
        label = name if not layers or layers == whole[name.split(".")[0]] else f"{name}  i = {ranges(layers)}"
        axes, words = Cell(" ".join(row["axes"]), "dim"), Cell(_ascii(row["meaning"], look))
        shape, inner = (Cell(f"[{', '.join(some)}]", "cyan") for some in (sizes, sizes[1:]))
        lines.append([Cell(_ascii(label, look)), axes, shape, words, inner])
    kept, gives = _columns(lines, look)
    shown = table([[line[i] for i in kept] for line in lines], "l" * len(kept), look, gives=kept.index(gives))
    return [*above, *shown]


_INNER = "shape in a batch"  # without the batch itself


def _columns(lines: list[list[Cell]], look: Look) -> tuple[list[int], int]:
    """Which columns there is room for, and the one that is cut short if need be.

    Whole names come first, which people copy; then words; the shape may do without the batch.
    """
    names, axes, shapes, words, inner = (max(width(line[i].text) for line in lines) + 2 for i in range(5))
    room = look.width + 2
    if not look.fits or names + axes + shapes + words <= room:
        return [0, 1, 2, 3], 3
    if names + inner + words <= room < names + shapes + words:
        return [0, 4, 3], 3
    if names + shapes + _LEAST <= look.width:
        return [0, 2, 3], 3
    if names + inner + _LEAST <= look.width:
        return [0, 4, 3], 3
    fitting = [i for i, size in ((2, shapes), (4, inner)) if names + size <= room]
    return [0, *fitting[:1]], 0


def _ascii(text: str, look: Look) -> str:
    return text.replace("–", "-").replace("·", ".") if look.plain else text
