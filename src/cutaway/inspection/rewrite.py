"""The same function with other weights: norms folded into what reads them, the stream or the scores centred.

Nothing is ever rewritten in place, and nothing by default: each of these gives a new model whose spec says what is
different.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection.figure import Figure, Rows
from cutaway.inspection.shown import Shown, for_json
from cutaway.kernels import Stored
from cutaway.models import Transformer
from cutaway.models.fused import FusedStack
from cutaway.spec import HeadSpec, ModelSpec
from cutaway.spec.parameters import parameter_shapes
from cutaway.spec.serial import spec_to_json


@dataclass(frozen=True, slots=True, repr=False)
class Rewritten(Shown):
    """A new model, and what is different in it.

    Attributes:
        model: with the new spec and weights of its own.
        what: what was done, in words.
        changed: names of the weights that hold other numbers than before, or are new.
        gone: names of those that there are no more.
        kept: norms whose weights no matrix could take, and why.
        neutral: what stays as it was: ``"logits"``, or only the ``"log-probabilities"``.
    """

    model: Transformer
    what: str
    changed: tuple[str, ...]
    gone: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    neutral: str

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, and the new spec."""
        return {
            "what": self.what,
            "neutral": self.neutral,
            "changed": list(self.changed),
            "gone": list(self.gone),
            "kept": [{"name": name, "why": why} for name, why in self.kept],
            "spec": spec_to_json(self.model.spec),
        }

    def figure(self) -> Figure:
        """Every weight that is not as it was."""
        shapes = parameter_shapes(self.model.spec)
        rows = [(name, " × ".join(map(str, shapes[name])), "changed") for name in self.changed]
        rows += [(name, "", "gone") for name in self.gone] + [(name, "", f"kept: {why}") for name, why in self.kept]
        notes = (
            f"The {self.neutral} are the model's own, but for rounding; quantities on the way to them are not.",
            "The model that was rewritten is as it was.",
        )
        return Figure(self.what, [Rows("weights", ["name", "shape", "what became of it"], rows)], notes)


PIECE = 1 << 22  # numbers of a matrix that are in double precision at a time


@final
class Draft:
    """Weights of a model to come. What is computed is computed in double precision and rounded once.

    Args:
        model: whose weights they are at first. It is only read.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.spec: ModelSpec = model.spec
        self.changed: dict[str, Tensor] = {}
        self.kept: dict[str, str] = {}
        self._own = dict(model.named_parameters())

    def has(self, name: str) -> bool:
        """Whether there is such a weight."""
        return name in self.changed or name in self._own

    def numbers(self, name: str) -> Tensor:
        """What a weight stands for, as it is now."""
        found = self.changed[name] if name in self.changed else self._own[name].detach()
        return found.dense() if isinstance(found, Stored) else found

    def set(self, name: str, value: Tensor) -> None:
        """Other numbers; under a new name, a new weight."""
        old = self._own.get(name)
        self.changed[name] = value.to(device=self.model.device, dtype=self.model.dtype if old is None else old.dtype)

    def change(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        """Other numbers, made of some rows of the old ones at a time. float64 [rows, …] → the same"""
        value = self.numbers(name)
        out = torch.empty_like(value)
        step = max(1, PIECE * len(value) // value.numel())
        for i in range(0, len(value), step):
            out[i : i + step] = function(value[i : i + step].cpu().double()).to(out)
        self.changed[name] = out

    def product(self, name: str, vector: Tensor) -> Tensor:
        """A matrix times a vector. float64 [rows]"""
        value = self.numbers(name)
        step = max(1, PIECE * len(value) // value.numel())
        return torch.cat([rows.cpu().double() @ vector for rows in value.split(step)])

    def untie(self) -> None:
        """A matrix of its own for a head that shares the embedding's, and a spec that says so."""
        head = self.spec.lm
        if head.tied:
            self.changed["head.weight"] = _copied(self._own["embed.tokens"])
            self.spec = replace(self.spec, head=replace(head, tied=False))

    def finish(self, what: str, neutral: str) -> Rewritten:
        """The new model."""
        shapes = parameter_shapes(self.spec)
        weights: dict[str, Tensor] = {}
        for name in shapes:
            weights[name] = self.changed[name] if name in self.changed else _copied(self._own[name])
        return Rewritten(
            model=_made(self.spec, weights, self.model),
            what=what,
            changed=tuple(name for name in shapes if name in self.changed),
            gone=tuple(name for name in self._own if name not in shapes),
            kept=tuple(self.kept.items()),
            neutral=neutral,
        )


def _copied(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return copy.deepcopy(value) if isinstance(value, Stored) else value.clone()


def _made(spec: ModelSpec, weights: Mapping[str, Tensor], like: Transformer) -> Transformer:
    with torch.device("meta"):
        model = Transformer(spec)
    learns = {name: p.requires_grad for name, p in like.named_parameters() if not isinstance(p, Stored)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not isinstance(weights[name], Stored) and learns.get(name, True))
    model.load_state_dict(dict(weights), assign=True)
    model.train(like.training)
    model.attention = like.attention
    if any(isinstance(stack.whole, FusedStack) for stack in (like.encoder, like.decoder)):
        model.use_kernels()
    return model


@torch.no_grad()
def centre_unembedding(model: Transformer) -> Rewritten:
    """Take from every logit the mean of all of them: log-probabilities stay, logits do not (Nanda & Bloom 2022).

    A tied head gets a matrix of its own.

    Raises:
        RequestError: the model scores no tokens, or caps its logits, which a shift gets through no cap unchanged.
    """
    head = model.spec.head
    if not isinstance(head, HeadSpec):
        raise RequestError("this model scores no tokens", field="head", hint="There is no unembedding to centre.")
    if head.soft_cap is not None:
        what = "logits are capped (soft_cap), and a shift before a cap is no shift after it"
        raise RequestError(what, field="head/soft_cap", expected=None, got=head.soft_cap)
    draft = Draft(model)
    draft.untie()
    for name in ("head.weight", "head.bias"):
        if draft.has(name):
            mean = draft.numbers(name).cpu().mean(0, dtype=torch.float64)
            draft.change(name, lambda rows, mean=mean: rows - mean)  # type: ignore[misc]
    return draft.finish("the unembedding centred", "log-probabilities")
