"""The neurons of a text's feed-forward networks that matter most at one of its tokens, and what each writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import whole
from cutaway.inspection.decompose import decompose
from cutaway.inspection.figure import Figure, Part, Rows
from cutaway.inspection.listed import listed
from cutaway.inspection.points import branch_of
from cutaway.inspection.readout import Spell, contributed, held, labels, main_stack, seen, token_head, whole_sum
from cutaway.inspection.running import trace
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.target import Of, place_in
from cutaway.models import Transformer
from cutaway.models.head import Head
from cutaway.modules.mlp import Mlp

SAID = 4  # tokens that are named for a neuron


@dataclass(frozen=True, slots=True, repr=False)
class Neurons(Shown):
    """The neurons that matter most at a token, the first of them most.

    Attributes:
        what: what they are ordered by, in words.
        position: of the token. piece: its text.
        branches: ``decoder.layers.3.mlp`` of each. neurons: its number there.
        acts: how strongly each fires.
        values: how much each matters, by which they are ordered.
        raised: tokens whose scores the direction that it writes raises most; empty where that has no meaning.
        of: how many neurons there are in all.
        spell: how a token is written, if that is known.
    """

    what: str
    position: int
    piece: str
    branches: tuple[str, ...]
    neurons: tuple[int, ...]
    acts: tuple[float, ...]
    values: tuple[float, ...]
    raised: tuple[tuple[int, ...], ...]
    of: int
    spell: Spell | None = field(default=None, repr=False, compare=False)

    def word(self, token: int) -> str:
        """A token as it is written, or its id."""
        return str(token) if self.spell is None else self.spell(token)

    def figure(self) -> Figure:
        """A row for each."""
        columns = ["branch", "neuron", "fires", self.what, *(["writes towards"] if self.raised else [])]
        rows: list[list[str | int | float]] = []
        for i, branch in enumerate(self.branches):
            words = [" ".join(seen(self.word(token)) for token in self.raised[i])] if self.raised else []
            rows.append([branch, self.neurons[i], self.acts[i], self.values[i], *words])
        title = f"The {len(rows)} largest of {self.of:,} neurons at “{self.piece}” (position {self.position})"
        parts: list[Part] = [Rows(title, columns, rows)]
        notes = ["How strongly a neuron fires is the model's own."]
        if "adds" in self.what:
            notes.append("What it adds is exact but for norms, whose scales are held at what they are here.")
        else:
            notes.append("Size is the length of what it writes: large is not the same as important.")
        if self.raised:
            said = "The tokens are those that its direction alone would raise (times its sign, through the last norm's "
            notes.append(said + "weights): an approximation, for what comes after reads it too.")
        return Figure("Neurons", parts, notes)

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        each = [
            {"branch": self.branches[i], "neuron": self.neurons[i], "fires": self.acts[i], "value": self.values[i]}
            | ({"raises": [self.word(token) for token in self.raised[i]]} if self.raised else {})
            for i in range(len(self.branches))
        ]
        return {"what": self.what, "position": self.position, "piece": self.piece, "of": self.of, "neurons": each}


@torch.no_grad()
def neurons(
    model: Transformer,
    ids: Sequence[int],
    of: Of | None = None,
    *,
    k: int = 10,
    position: int | None = None,
    layers: Sequence[int] | None = None,
    source: Sequence[int] | None = None,
    pieces: Sequence[str] | None = None,
    spell: Spell | None = None,
) -> Neurons:
    """The neurons that add most to a number, or that write most.

    Args:
        model: with feed-forward networks; experts are not looked into.
        ids: of one text; of an encoder–decoder, what its decoder reads.
        of: what they add to (see :func:`decompose`); without, they are ordered by the length of what each writes.
        k: how many.
        position: of the token; the last by default.
        layers: only these.
        source: of an encoder–decoder, what its encoder reads.
        pieces: a text for each token. spell: a token's id → how it is written.

    Raises:
        RequestError: no such layers, or no feed-forward network in them; what :func:`decompose` refuses.
    """
    main = model.spec.main
    stack = model.spec.stacks[main]
    wanted = range(len(stack.layers)) if layers is None else listed("layers", layers, "layers' numbers")
    bodies: dict[str, Mlp] = {}
    for i in wanted:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(stack.layers):
            raise RequestError("no such layer", field="layers", expected=f"0…{len(stack.layers) - 1}", got=i)
        for branch in stack.layers[i].branches:
            body = branch_of(model, name := f"{main}.layers.{i}.{branch.name}").body
            if isinstance(body, Mlp):
                bodies[name] = body
    if not bodies:
        raise RequestError("there is no feed-forward network", field="layers", got=list(wanted))
    place, shown = place_in(len(ids), position), labels(ids, pieces)
    sources = None if source is None else [list(source)]
    seen = trace(model, [list(ids)], tuple(f"{name}.act" for name in bodies), sources=sources)
    acts = {name: seen[f"{name}.act"][0, place].float().cpu() for name in bodies}
    if of is None:
        what = "size"
        values = {name: acts[name].abs() * _lengths(body) for name, body in bodies.items()}
    else:
        parts = decompose(model, ids, of, position=position, source=source, neurons=tuple(bodies))
        what, values = "adds", {name: parts.neurons[name].float() for name in bodies}
    best: list[tuple[str, int]] = []
    sizes = torch.cat([values[name].abs() for name in bodies])
    starts = [0]
    for name in bodies:
        starts.append(starts[-1] + len(values[name]))
    for flat in sizes.topk(min(whole("k", k, 1), len(sizes))).indices.tolist():
        which = next(i for i, end in enumerate(starts[1:]) if flat < end)
        best.append(([*bodies][which], flat - starts[which]))
    says = isinstance(model.head, Head) and whole_sum(model) and model.head.spec.transform is None
    return Neurons(
        what=what,
        position=place,
        piece=shown[place],
        branches=tuple(name for name, _ in best),
        neurons=tuple(i for _, i in best),
        acts=tuple(float(acts[name][i]) for name, i in best),
        values=tuple(float(values[name][i]) for name, i in best),
        raised=_raised(model, bodies, acts, best) if says else (),
        of=len(sizes),
        spell=spell,
    )


def _lengths(body: Mlp) -> Tensor:
    """How long what each neuron writes is, when it fires 1. [d_ff]"""
    return body.down.weight.cpu().float().norm(dim=0)


def _raised(
    model: Transformer, bodies: dict[str, Mlp], acts: dict[str, Tensor], best: list[tuple[str, int]]
) -> tuple[tuple[int, ...], ...]:
    """The tokens that each neuron's direction, signed as it fires, raises most."""
    token_head(model)
    written = []
    downs = {name: bodies[name].down.weight.cpu() for name, _ in best}
    for name, i in best:
        column = downs[name][:, i].float() * (1 if acts[name][i] >= 0 else -1)
        at = branch_of(model, name)
        written.append(held(at.out_norm, column[None].to(model.device), torch.ones(1, 1, device=model.device))[0])
    rows = held(main_stack(model).norm, torch.stack(written), torch.ones(1, 1, device=model.device))
    # Some at a time: a row of scores for each of all neurons would be gigabytes.
    some = (contributed(model, part.to(model.dtype)).topk(SAID).indices.tolist() for part in rows.split(256))
    return tuple(tuple(row) for part in some for row in part)
