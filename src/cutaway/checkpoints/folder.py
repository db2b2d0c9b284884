"""A Hugging Face folder: config.json beside safetensors."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from cutaway.checkpoints.settings import read_settings
from cutaway.errors import ConfigError, ShardError, UnsupportedModelError
from cutaway.families import Family, family_of
from cutaway.formats.config import ConfigReader
from cutaway.formats.files import read_json
from cutaway.formats.packed import Packed
from cutaway.formats.safetensors import SafetensorsFile
from cutaway.formats.shards import ShardedSafetensors
from cutaway.kernels.stored import FORMATS
from cutaway.spec import GenerationSettings, ModelSpec

UNFINISHED = ".cutaway-unfinished"  # stands in a folder while a model is saved into it
MOST_CONFIG = 4 << 20


def read_config(
    folder: Path, ignore: Iterable[str] = ()
) -> tuple[Family, ModelSpec, GenerationSettings, dict[str, Any]]:
    """Family, spec and generation defaults of a folder, and the config as it stands.

    Raises:
        ConfigError, LimitExceeded, UnsupportedModelError.
    """
    if (folder / UNFINISHED).exists():
        raise ShardError(
            "a save into this folder did not finish, so its files may be of two models",
            path=folder,
            hint="Save the model again, or fetch it again.",
        )
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError("missing", path=path, hint="A model folder has a config.json beside its weights.")
    values = read_json(path, limit=MOST_CONFIG, error=ConfigError)
    if not isinstance(values, dict):
        raise ConfigError("not an object", path=path, expected="an object", got=type(values).__name__)
    if values.get("quantization_config") is not None:
        method = values["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise UnsupportedModelError(
            "quantized weights of this kind are not supported", path=path, field="/quantization_config", got=method
        )
    try:
        family = family_of(values.get("model_type"), path=str(path))
    except UnsupportedModelError as error:
        if "auto_map" in values:
            error.hint = "This model brings its own Python code (auto_map), which cutaway never runs."
        raise
    if "auto_map" in values:
        warnings.warn(f"{path}: auto_map names code, which is not run; {family.model_type} is built in", stacklevel=2)
    reader = ConfigReader(values, path=str(path), ignore=ignore)
    spec = family.read(reader)
    for key in ("dtype", "torch_dtype"):
        dtype = values.get(key)
        if dtype is not None and dtype not in ("float32", "float16", "bfloat16", "float64", "auto"):
            raise reader.error(key, "unknown value", expected="float32, float16 or bfloat16", got=dtype)
    generation, stated = None, dict[str, Any]()
    beside = folder / "generation_config.json"
    if beside.exists() or beside.is_symlink():  # a link to nowhere is not the same as no file
        raw = read_json(beside, limit=MOST_CONFIG, error=ConfigError)
        if not isinstance(raw, dict):
            raise ConfigError("not an object", path=beside, expected="an object", got=type(raw).__name__)
        generation, stated = ConfigReader(raw, path=str(beside), ignore=ignore), raw
    _note_unmet(frozenset(ignore), values, stated, path)
    # A second reader: the first has already accounted for every key.
    return (
        family,
        spec,
        read_settings(ConfigReader(values, path=str(path), ignore=ignore), generation, spec.vocab_size),
        values,
    )


def _note_unmet(ignore: frozenset[str], config: dict[str, Any], generation: dict[str, Any], path: Path) -> None:
    """Say which keys to ignore are not there: they may be misspelt."""
    there = {*config, *generation}
    there |= {key for value in (*config.values(), *generation.values()) if isinstance(value, dict) for key in value}
    for key in sorted(ignore - there):
        near = difflib.get_close_matches(key, there, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        warnings.warn(f"{path}: there is no key {key!r} to ignore{hint}", stacklevel=2)


class FolderSource:
    """Tensors of a folder's safetensors, or of one file; quantized ones dequantised."""

    def __init__(self, path: Path, mmap: bool) -> None:
        self._files = ShardedSafetensors(path, mmap=mmap) if path.is_dir() else SafetensorsFile(path, mmap=mmap)
        try:
            self._packed = Packed(self._files)
        except BaseException:
            self._files.close()
            raise

    def names(self) -> list[str]:
        """Every tensor."""
        return self._files.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one."""
        return self._packed.shape(name)

    def raw(self, name: str) -> tuple[Tensor, int] | None:
        """A quantized matrix's rows as they are stored, and the number of their format, where kernels read that."""
        found = self._packed.raw(name) if name in self._packed.kinds else None
        return found if found is not None and found[1] in FORMATS else None

    def read(self, name: str) -> Tensor:
        """One tensor, as stored, or in fp32."""
        return self._packed.read(name)

    def close(self) -> None:
        """Close the files."""
        self._files.close()
