"""Writing a model as a GGUF file that llama.cpp reads, or refusing by name what it could not read there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutaway.checkpoints.gguf import read_gguf
from cutaway.checkpoints.quantised import F32, Losses, Target, dense, planned
from cutaway.checkpoints.save import config_of
from cutaway.errors import ConfigError, RequestError, UnsupportedModelError
from cutaway.families import Family, GgufForm, family_of
from cutaway.formats.gguf_metadata import metadata_from_config
from cutaway.formats.gguf_names import gguf_rules
from cutaway.formats.gguf_write import PLAIN_TYPES, FileTensor, Metadata, Typed, write_gguf
from cutaway.formats.mixes import Mix, file_type
from cutaway.formats.rules import WeightRule
from cutaway.models import Transformer
from cutaway.modules.rotary import speeds
from cutaway.spec import AttentionSpec, BranchSpec, FactorScaling, Llama3Scaling, ModelSpec, RotarySpec
from cutaway.spec.serial import difference

__all__ = ["save_gguf"]

FACTORS = "rope_freqs.weight"
# llama.cpp wants these in full precision, with norms and biases; matrices are as is asked for.
_FULL = ("position_embd.weight", FACTORS, ".ffn_gate_inp.weight")  # ends of names
_QUANTIZATION = 2  # ggml's version of the block types


def save_gguf(
    model: Transformer,
    path: Path,
    vocabulary: Metadata,
    *,
    dtype: torch.dtype | None = None,
    quantize: Mix | None = None,
    verify: bool = True,
    losses: Losses | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a model as one file, whole or not at all, one tensor in memory at a time.

    Args:
        model: of a family that has a form in GGUF.
        path: may be the file that the model was loaded from.
        vocabulary: the tokenizer's key/values.
        dtype: of the matrices: float32, float16 or bfloat16; by default the model's own, and stored blocks as they
            are. The rest is float32.
        quantize: what matrices become instead, those whose rows are whole blocks. Those that are so already keep
            their bytes.
        verify: read the file back and compare everything before it takes its name.
        losses: told what became of each matrix.
        progress: told (bytes written, bytes in all).

    Raises:
        UnsupportedModelError: a family without a form in GGUF.
        ConfigError: something of the model that the format cannot say, by name.
        RequestError: a dtype or number that it cannot hold.
        DtypeError: a number that a block cannot hold.
        StorageError: the disk refused; what was there stays.
    """
    family = family_of(model.spec.family)
    kind = PLAIN_TYPES.get(dtype or model.dtype)
    if kind is None:
        wanted = "float32, float16 or bfloat16"
        raise RequestError("GGUF cannot hold this type", field="dtype", expected=wanted, got=dtype or model.dtype)
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    plan = plan_gguf(family, model.spec, {name: tuple(tensor.shape) for name, tensor in own.items()})
    to = Target(quantize, kind, keep=dtype is None)
    found = [
        _file_tensor(rule, place, own, model.spec, to, losses)
        for rule in plan.rules
        for place in range(len(rule.theirs))
    ]
    tensors = [tensor for tensor, _ in found]
    matrices = [(tensor.type, prod(tensor.shape)) for tensor, matrix in found if matrix]
    stated = file_type(matrices) if quantize is None else quantize.file_type
    metadata = {**plan.metadata, "general.file_type": ("u32", stated)}
    if any(kind.block > 1 for kind, _ in matrices):
        metadata["general.quantization_version"] = ("u32", _QUANTIZATION)
    metadata |= vocabulary
    if plan.factors is not None:
        factors = plan.factors
        tensors.append(FileTensor(FACTORS, tuple(factors.shape), F32, lambda: factors))
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def step(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    write_gguf(path, metadata, tensors, verify=verify, progress=step)


def _file_tensor(
    rule: WeightRule, place: int, own: Mapping[str, Tensor], spec: ModelSpec, to: Target, losses: Losses | None
) -> tuple[FileTensor, bool]:
    """A tensor of the file, and whether it is a matrix that may have any type."""
    name, parts = rule.theirs[place], tuple(own[part] for part in rule.ours)
    shape = tuple(rule.save(tuple(torch.empty(part.shape, device="meta") for part in parts))[place].shape)
    if len(shape) > 1 and not name.endswith(_FULL):
        matrix = planned(rule, place, name, shape, parts, spec, to)
        return FileTensor(name, shape, matrix.type, lambda: matrix.make(parts, losses)), True

    def make() -> Tensor:
        # In fp32 where the rule computes: a norm's weight plus one has more digits than bf16 holds.
        with torch.no_grad():
            return rule.save(tuple(dense(part) for part in parts))[place]

    return FileTensor(name, shape, F32, make), False


# ---- what the file says of the model -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything of a file but its numbers.

    Attributes:
        metadata: of the model, without the vocabulary.
        rules: how its tensors are made, ties left out.
        factors: what each rotary pair's speed is divided by, if there are such. [d_rotary / 2]
    """

    metadata: dict[str, Typed]
    rules: list[WeightRule]
    factors: Tensor | None


def form_of(spec: ModelSpec) -> GgufForm:
    """How a model's family is said in GGUF.

    Raises:
        UnsupportedModelError: it is not.
    """
    family = family_of(spec.family)
    if family.gguf is None:
        raise UnsupportedModelError(
            "this family has no form in GGUF",
            field="format",
            expected="hf or cutaway",
            got=family.model_type,
            hint="cutaway's own format holds any model: format='cutaway', or in a terminal the name of a folder",
        )
    return family.gguf


def plan_gguf(family: Family, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> Plan:
    """The metadata and rules of a spec, if reading them back gives the same spec.

    Raises:
        UnsupportedModelError, ConfigError: as :func:`save_gguf`.
    """
    form = form_of(spec)
    factors = _factors(spec) if form.factors else None
    plain = spec if factors is None else _rescaled(spec, None)
    config = form.express(config_of(family, plain))
    metadata: dict[str, Typed] = {
        "general.architecture": ("str", form.arch),
        "general.type": ("str", "model"),
        **metadata_from_config(config, form.arch, form.keys),
    }
    rules = [rule for rule in gguf_rules(spec, list(shapes), form.alter(spec)) if rule.ours]
    stored = _Planned({key: _as_read(*typed) for key, typed in metadata.items()}, rules, shapes, factors)
    _, found, _ = read_gguf(stored, "")
    wanted = spec if factors is None else _rescaled(spec, FactorScaling(tuple(factors.tolist())))
    lost = difference(_bare(wanted), _bare(found))
    if lost is not None:
        at, ours, theirs = lost
        hint = "save(model, path, format='cutaway') holds any model"
        raise ConfigError(f"a {form.arch} GGUF cannot say this", field=at, expected=theirs, got=ours, hint=hint)
    return Plan(metadata, rules, factors)


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]


class _Planned:
    """The tables of a file that is not written yet."""

    def __init__(
        self,
        metadata: Mapping[str, Any],
        rules: list[WeightRule],
        shapes: Mapping[str, tuple[int, ...]],
        factors: Tensor | None,
    ) -> None:
        self.metadata = metadata
        self._factors = factors
        self.tensors: dict[str, _Shape] = {}
        for rule in rules:
            stored = rule.save(tuple(torch.empty(shapes[name], device="meta") for name in rule.ours))
            self.tensors |= {name: _Shape(tuple(t.shape)) for name, t in zip(rule.theirs, stored, strict=True)}
        if factors is not None:
            self.tensors[FACTORS] = _Shape(tuple(factors.shape))

    def read(self, name: str) -> Tensor:
        """The factors: nothing else is read for a spec."""
        assert name == FACTORS
        assert self._factors is not None
        return self._factors


def _as_read(kind: str, value: Any) -> Any:
    return float(np.float32(value)) if kind == "f32" else value


def _rotaries(spec: ModelSpec) -> list[RotarySpec]:
    found = (layer.attention.rotary for layer in spec.decoder.layers)
    return list(dict.fromkeys(rotary for rotary in found if rotary is not None))


def _factors(spec: ModelSpec) -> Tensor | None:
    """What the speed of each pair is divided by, where a scaling is one list of such numbers."""
    rotaries = _rotaries(spec)
    if len(rotaries) != 1 or not isinstance(rotaries[0].scaling, Llama3Scaling | FactorScaling):
        return None
    if isinstance(rotaries[0].scaling, FactorScaling):
        return torch.tensor(rotaries[0].scaling.factors, dtype=torch.float32)
    return speeds(replace(rotaries[0], scaling=None))[0] / speeds(rotaries[0])[0]


def _rescaled(spec: ModelSpec, scaling: FactorScaling | None) -> ModelSpec:
    def changed(branch: BranchSpec) -> BranchSpec:
        body = branch.body
        if not isinstance(body, AttentionSpec) or body.rotary is None:
            return branch
        return replace(branch, body=replace(body, rotary=replace(body.rotary, scaling=scaling)))

    layers = tuple(replace(layer, branches=tuple(map(changed, layer.branches))) for layer in spec.decoder.layers)
    return replace(spec, decoder=replace(spec.decoder, layers=layers))


def _bare(value: Any) -> Any:
    """A spec as GGUF could hold it: numbers in fp32, nothing of training, nothing of a config."""
    if is_dataclass(value) and not isinstance(value, type):
        made = {f.name: _bare(getattr(value, f.name)) for f in fields(value)}
        made |= {name: 0.0 for name in ("dropout", "jitter") if name in made}
        return replace(value, **(made | ({"kept": ()} if "kept" in made else {})))
    if isinstance(value, tuple):
        return tuple(map(_bare, value))
    return float(np.float32(value)) if isinstance(value, float) else value
