"""A model's tensors as a tree, equal layers folded into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cutaway.cli.anatomy import Part, Source
from cutaway.cli.text import Cell, Look, bar, nbytes, rounded, table
from cutaway.spec import HeadSpec, StackSpec

_GUIDES = {False: ("├─ ", "└─ ", "│  "), True: ("|- ", "`- ", "|  ")}


@dataclass(slots=True)
class Node:
    """A part of the model.

    Attributes:
        label: what it is called here.
        parts: every tensor of it, over all folded layers.
        times: layers folded into this node; its children show the first of them.
        note: said after the label.
    """

    label: str
    parts: list[Part]
    times: int = 1
    note: str = ""
    children: list[Node] = field(default_factory=list)


def build(source: Source, *, fold: bool = True) -> Node:
    """The tree of a model whose family is known, or the flat list of one that is not."""
    root = Node("model", source.parts)
    if source.spec is None:
        root.children = [Node(part.name, [part]) for part in source.parts]
        return root
    inside = tuple(f"{name}." for name in source.spec.stacks)
    outside = [part for part in source.parts if not part.name.startswith(inside)]
    first = [part for part in outside if part.name.startswith(("embed", "source_embed"))]
    root.children = [Node(part.name, [part]) for part in first]
    root.children += [_stack(source, name, stack, fold) for name, stack in source.spec.stacks.items()]
    root.children += [Node(part.name, [part]) for part in outside if part not in first]
    if isinstance(source.spec.head, HeadSpec) and source.spec.head.tied:
        root.children.append(Node("head", [], note="= embed.tokens"))
    return root


def _stack(source: Source, at: str, spec: StackSpec, fold: bool) -> Node:
    """The layers of one stack, and what follows them."""
    inside = [part for part in source.parts if part.name.startswith(f"{at}.")]
    layers = [[p for p in inside if p.name.startswith(f"{at}.layers.{i}.")] for i in range(len(spec.layers))]
    stack = Node(at, inside)
    groups = _alike(at, spec, layers) if fold else [[i] for i in range(len(layers))]
    for group in groups:
        label = f"layers {ranges(group)}" if len(group) > 1 else f"layer {group[0]}"
        node = Node(label, [part for i in group for part in layers[i]], times=len(group))
        for branch in spec.layers[group[0]].branches:
            prefixes = [f"{at}.layers.{i}.{branch.name}." for i in group]
            rows = [[p for p in layers[i] if p.name.startswith(at)] for i, at in zip(group, prefixes, strict=True)]
            inner = Node(branch.name, [part for row in rows for part in row], times=len(group))
            for same in zip(*rows, strict=False):
                inner.children.append(Node(same[0].name.removeprefix(prefixes[0]), list(same), times=len(group)))
            node.children.append(inner)
        stack.children.append(node)
    shown = {part.name for layer in layers for part in layer}
    stack.children += [Node(p.name.removeprefix(f"{at}."), [p]) for p in inside if p.name not in shown]
    return stack


def _alike(at: str, spec: StackSpec, layers: Sequence[Sequence[Part]]) -> list[list[int]]:
    """Layers of one spec and one set of shapes, wherever they stand. How numbers are stored may differ."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, (layer, parts) in enumerate(zip(spec.layers, layers, strict=True)):
        shapes = tuple((part.name.removeprefix(f"{at}.layers.{i}."), part.shape) for part in parts)
        groups.setdefault((layer, shapes), []).append(i)
    return list(groups.values())


def ranges(numbers: Sequence[int]) -> str:
    """
    >>> ranges([0, 1, 2, 4, 6, 7])
    '0–2, 4, 6–7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}–{b}" if a != b else str(a) for a, b in runs)


def draw(root: Node, look: Look, *, depth: int = 99, stored: bool = False) -> list[str]:
    """The tree, one node a line, with as many columns of facts as there is room for."""
    rows: list[list[str | Cell]] = []
    _walk(root, "", "", depth, look, rows, stored)
    # the number of columns from which each fact is shown; the file's names, if asked for, come first and whole
    room = {0: 0, 1: 96, 2: 112, 3: 0, 4: 124, 5: 0} if stored else {0: 0, 1: 72, 2: 0, 3: 60, 4: 48}
    keep = [i for i, least in room.items() if look.width >= least]
    aligns = "lrrlrl"
    head: list[str | Cell] = [
        Cell(word, "dim") for word in ("", "shape", "parameters", "type", "stored", "name in the file")
    ]
    chosen = [[row[i] for i in keep] for row in [head, *rows]]
    return table(chosen, "".join(aligns[i] for i in keep), replace(look, fits=look.fits and not stored))


def _walk(
    node: Node, lead: str, inner: str, depth: int, look: Look, rows: list[list[str | Cell]], stored: bool
) -> None:
    label = node.label.replace("–", "-") if look.plain else node.label
    cross = "x" if look.plain else "×"
    folded = node.times > 1 and node.label.startswith("layers")
    one = 1 if folded else node.times  # a folded node says what all its layers have, what is inside it what one has
    count = sum(part.numel for part in node.parts) // one
    size = sum(part.nbytes for part in node.parts) / one
    leaf = not node.children
    types, shape = "", f"{node.times} {cross} {rounded(count // node.times)}" if folded else ""
    if leaf and node.parts:
        shape = f" {cross} ".join(map(str, node.parts[0].shape)) or "one number"
        types = "/".join(sorted({part.type for part in node.parts}))
    about = "~" if not folded and len(set(_by_layer(node))) > 1 else ""  # layers differ: the mean
    name = Cell(f"{lead}{label}  {node.note}".rstrip(), "" if leaf else "bold")
    file = node.parts[0].stored if leaf and node.parts and stored else ""
    number, stored_size = (f"{count:,}", about + nbytes(size)) if node.parts else ("", "")
    rows.append([name, Cell(shape, "cyan"), number, Cell(types, "yellow"), stored_size, Cell(file, "dim")])
    if depth <= 0:
        return
    tee, elbow, bar_ = _GUIDES[look.plain]
    for child in node.children:
        last = child is node.children[-1]
        _walk(child, inner + (elbow if last else tee), inner + ("   " if last else bar_), depth - 1, look, rows, stored)


def _by_layer(node: Node) -> list[int]:
    """Bytes of a node in each of the layers folded into it."""
    if node.children:
        return [sum(sizes) for sizes in zip(*map(_by_layer, node.children), strict=False)]
    return [part.nbytes for part in node.parts] if node.times > 1 else []


def by_type(parts: Sequence[Part]) -> dict[str, tuple[int, int, int]]:
    """Type → (tensors, parameters, bytes), the largest first."""
    found: dict[str, tuple[int, int, int]] = {}
    for part in parts:
        n, count, size = found.get(part.type, (0, 0, 0))
        found[part.type] = (n + 1, count + part.numel, size + part.nbytes)
    return dict(sorted(found.items(), key=lambda item: -item[1][2]))


def draw_types(parts: Sequence[Part], look: Look) -> list[str]:
    """How the numbers are stored: a bar for each type."""
    total = sum(part.nbytes for part in parts) or 1
    room = max(look.width - 52, 0)
    rows: list[list[str | Cell]] = []
    for kind, (n, count, size) in by_type(parts).items():
        strip = Cell(bar(size / total, room, look).ljust(room), "cyan")
        tensors = f"{n} tensor{'s' if n != 1 else ''}"
        row: list[str | Cell] = [Cell(kind, "yellow"), tensors, rounded(count)]
        rows.append([*row, *([strip] if room > 4 else []), nbytes(size), f"{8 * size / max(count, 1):.1f} bits"])
    return table(rows, "lrr" + ("l" if room > 4 else "") + "rr", look)


def draw_list(parts: Sequence[Part], look: Look, *, stored: bool = False) -> list[str]:
    """Tensors one a line under their whole names."""
    cross = " x " if look.plain else " × "
    words = ("name", "shape", "type", "stored", "name in the file")
    rows: list[list[str | Cell]] = [[Cell(word, "dim") for word in words]]
    for part in parts:
        shape = Cell(cross.join(map(str, part.shape)) or "one number", "cyan")
        rows.append([part.name, shape, Cell(part.type, "yellow"), nbytes(part.nbytes), Cell(part.stored, "dim")])
    keep = 5 if stored else 4
    return table([row[:keep] for row in rows], "lrlrl"[:keep], replace(look, fits=look.fits and not stored))
