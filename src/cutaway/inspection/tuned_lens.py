"""The tuned lens: an affine map for each layer that brings the stream to the form that it has at its end.

Belrose et al. 2023, https://arxiv.org/abs/2303.08112.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import FormatError, ResumeMismatch, ShapeMismatch
from cutaway.formats.files import StrPath, sweep
from cutaway.formats.safetensors import SafetensorsFile, save_safetensors
from cutaway.generation.fingerprint import model_facts, spec_difference
from cutaway.models import Transformer

FORMAT = "cutaway tuned lens"
VERSION = "1"


def tuned_points(model: Transformer) -> list[str]:
    """The streams that a tuned lens has maps for: before each layer."""
    return [f"{model.spec.main}.layers.{i}.resid_in" for i in range(model.spec.n_layers)]


@dataclass(frozen=True, slots=True)
class TunedLens:
    """A map of the stream before each layer to the form that it has at the end: ``x + x Wᵀ + b``.

    Attributes:
        names: of the streams that are known, in order.
        weight: W of each. [layer, d_model, d_model]
        bias: b of each. [layer, d_model]
        plain: KL from the final distribution to that of the logit lens, in nats, on texts kept from training. [layer]
        tuned: the same of this lens. [layer]
        model: what model it is of: see :func:`model_facts`.
    """

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor
    plain: Tensor
    tuned: Tensor
    model: dict[str, str]

    def knows(self, name: str) -> bool:
        """Whether there is a map for the stream of this name."""
        return name in self.names

    def translate(self, name: str, x: Tensor) -> Tensor:
        """[..., d_model] → the same."""
        place = self.names.index(name)
        weight, bias = (t[place].to(device=x.device) for t in (self.weight, self.bias))
        return (x.float() + F.linear(x.float(), weight, bias)).to(x.dtype)

    def save(self, path: StrPath) -> None:
        """Write it as one safetensors file, so that ``path`` is the old file or the whole new one at every moment."""
        sweep(Path(os.path.realpath(path)).parent)  # what a killed writer left, an hour ago or more
        tensors = {"weight": self.weight, "bias": self.bias, "plain": self.plain, "tuned": self.tuned}
        save_safetensors(path, tensors, {"format": FORMAT, "version": VERSION, **self.model})

    @classmethod
    def load(cls, model: Transformer, path: StrPath) -> TunedLens:
        """Read one that is of this model.

        Raises:
            ResumeMismatch: it is of another model, or of other weights.
            FormatError: no tuned lens. ShapeMismatch: its tensors are not of this model's sizes.
        """
        with SafetensorsFile(path) as file:
            stated, facts = dict(file.metadata), model_facts(model)
            if stated.get("format") != FORMAT or stated.get("version") != VERSION:
                got = f"{stated.get('format')} {stated.get('version')}"
                raise FormatError(
                    "is no tuned lens", path=path, field="format", expected=f"{FORMAT} {VERSION}", got=got
                )
            _check_model(path, stated, facts)
            tensors = {name: file.read(name) for name in file.names()}
        names, d = tuned_points(model), model.spec.d_model
        shapes = {"weight": (len(names), d, d), "bias": (len(names), d), "plain": (len(names),), "tuned": (len(names),)}
        for name, shape in shapes.items():
            if name not in tensors or tensors[name].shape != shape or tensors[name].dtype != torch.float32:
                shown = f"{tensors[name].dtype} {[*tensors[name].shape]}" if name in tensors else None
                wanted = f"torch.float32 {[*shape]}"
                raise ShapeMismatch("not what this model has", path=path, field=name, expected=wanted, got=shown)
        return cls(tuple(names), **{name: tensors[name] for name in shapes}, model=facts)


def _check_model(path: StrPath, stated: dict[str, str], facts: dict[str, str]) -> None:
    for key, what in (("spec", "is of another model"), ("weights", "is of other weights")):
        theirs = stated.get(key)
        if theirs is None:
            raise FormatError("missing", path=path, field=key)
        if theirs == facts[key]:
            continue
        at, mine, other = key, facts[key], theirs
        if key == "spec":
            found = spec_difference(path, facts[key], theirs)
            if found is None:
                continue  # written otherwise, and the same
            at, mine, other = found
        raise ResumeMismatch(what, path=path, field=at, expected=mine, got=other, hint="Train one for this model.")
