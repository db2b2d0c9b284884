"""A GGUF file: weights, settings and vocabulary in one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cutaway.errors import ConfigError, LimitExceeded, ShapeMismatch, UnsupportedModelError
from cutaway.families import Family, gguf_family
from cutaway.formats.config import ConfigReader
from cutaway.formats.gguf import GgufFile
from cutaway.formats.gguf_metadata import COMMON, config_from_metadata
from cutaway.formats.gguf_split import SplitGguf
from cutaway.kernels.stored import FORMATS
from cutaway.spec import AttentionSpec, BranchSpec, FactorScaling, GenerationSettings, ModelSpec

_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class Shaped(Protocol):
    """Something with a shape, outermost first."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class GgufTables(Protocol):
    """What a spec is read from: key/values, and the tensors' shapes."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Shaped]: ...
    def read(self, name: str) -> Tensor: ...


def read_gguf(file: GgufTables, path: str) -> tuple[Family, ModelSpec, GenerationSettings]:
    """Family, spec and generation defaults of a GGUF.

    Raises:
        UnsupportedModelError, ConfigError, ShapeMismatch.
    """
    metadata: dict[str, Any] = dict(file.metadata)
    family = gguf_family(metadata, path=path)
    form = family.gguf
    assert form is not None
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError("not a whole model", path=path, field="general.type", expected="model", got=kind)
    if "token_embd.weight" not in file.tensors:
        raise ShapeMismatch("tensor is missing", path=path, field="token_embd.weight")
    table = file.tensors["token_embd.weight"].shape
    tied = "output.weight" not in file.tensors
    config = config_from_metadata(metadata, form.arch, form.keys, tied=tied, rows=table[0], path=path)
    _compare_layers(file, form.arch, metadata, path)
    config["model_type"] = family.model_type
    try:
        form.complete(config, metadata)
    except ConfigError as error:
        raise error.at(path) from error
    for key in ("bos", "eos", "pad"):
        token = metadata.get(f"tokenizer.ggml.{'padding' if key == 'pad' else key}_token_id")
        if token is not None:
            config[f"{key}_token_id"] = token
    spec = _read_spec(family, config, path)
    if "rope_freqs.weight" in file.tensors:
        spec = _with_factors(spec, file.read("rope_freqs.weight").flatten().tolist(), path)
    return family, spec, GenerationSettings(eos_ids=_eos(metadata, spec.vocab_size, path))


def _read_spec(family: Family, config: dict[str, Any], path: str) -> ModelSpec:
    """Read the config; where something is wrong with it, name the GGUF's key instead of the config's."""
    assert family.gguf is not None
    words = {name: word for word, name in {**COMMON, **family.gguf.keys}.items()}
    try:
        return family.read(ConfigReader(config, path=path))
    except (ConfigError, LimitExceeded) as error:
        name = (error.field or "").rsplit("/", 1)[-1]
        if name not in words:
            raise
        field = f"{family.gguf.arch}.{words[name]}"
        raise type(error)(error.what, path=path, field=field, expected=error.expected, got=error.got) from error


def _compare_layers(file: GgufTables, arch: str, metadata: dict[str, Any], path: str) -> None:
    """The stated number of layers against the tensors, before anything is built for it."""
    stated = metadata.get(f"{arch}.block_count")
    numbers = (name.split(".")[1] for name in file.tensors if name.startswith("blk."))
    there = 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)
    if isinstance(stated, int) and not isinstance(stated, bool) and stated != there:
        field = f"{arch}.block_count"
        raise ConfigError("differs from the tensors", path=path, field=field, expected=there, got=stated)


def _with_factors(spec: ModelSpec, factors: list[float], path: str) -> ModelSpec:
    """The spec with each rotary pair's speed divided by its factor."""

    def slowed(branch: BranchSpec) -> BranchSpec:
        body = branch.body
        if not isinstance(body, AttentionSpec) or body.rotary is None:
            return branch
        if len(factors) != body.rotary.d_rotary // 2 or not all(0 < factor < math.inf for factor in factors):
            raise ConfigError(
                "one positive factor for each rotary pair is needed",
                path=path,
                field="rope_freqs.weight",
                expected=body.rotary.d_rotary // 2,
                got=len(factors),
            )
        return replace(branch, body=replace(body, rotary=replace(body.rotary, scaling=FactorScaling(tuple(factors)))))

    layers = tuple(replace(layer, branches=tuple(map(slowed, layer.branches))) for layer in spec.decoder.layers)
    return replace(spec, decoder=replace(spec.decoder, layers=layers))


def _eos(metadata: dict[str, Any], vocab_size: int, path: str) -> tuple[int, ...]:
    ids = set()
    for key in _EOS_KEYS:
        token = metadata.get(key)
        if token is None:
            continue
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            wanted = f"0…{vocab_size - 1}"
            raise ConfigError("not a token of this vocabulary", path=path, field=key, expected=wanted, got=token)
        ids.add(token)
    return tuple(sorted(ids))


class GgufSource:
    """Tensors of a GGUF, dequantised."""

    def __init__(self, file: GgufFile | SplitGguf) -> None:
        self._file = file

    def names(self) -> list[str]:
        """Every tensor."""
        return list(self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one, outermost first."""
        return tuple(self._file.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """One tensor in fp32."""
        return self._file.read(name)

    def read_ahead(self) -> None:
        """Begin to read what `raw` gives, and what is fp32 anyway, while the caller does something else."""
        if isinstance(self._file, GgufFile):  # several files are so large that nothing else takes as long
            self._file.read_ahead([name for name in self.names() if self._is_raw(name) or self._is_fp32(name)])

    def _is_fp32(self, name: str) -> bool:
        return self._file.tensors[name].type.id == 0

    def _is_raw(self, name: str) -> bool:
        info = self._file.tensors[name]
        return info.type.id != 0 and info.type.id in FORMATS and len(info.shape) >= 2

    def raw(self, name: str) -> tuple[Tensor, int] | None:
        """The rows of a matrix, or of several, as they are stored, and their format; None of what is fp32 anyway."""
        if not self._is_raw(name):
            return None
        info = self._file.tensors[name]
        return torch.from_numpy(self._file.raw(name)).view(*info.shape[:-1], -1), info.type.id
