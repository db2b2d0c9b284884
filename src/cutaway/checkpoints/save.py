"""Giving a model back as a folder: Hugging Face's, or our own, which holds any spec."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from cutaway.checkpoints.load import DTYPES, Checkpoint
from cutaway.errors import ConfigError, RequestError, StorageError
from cutaway.families import Family, family_of
from cutaway.formats.config import ConfigReader
from cutaway.formats.files import atomic_write
from cutaway.formats.rules import saved
from cutaway.formats.shards import save_sharded
from cutaway.models import Transformer
from cutaway.spec import ModelSpec
from cutaway.spec.serial import difference

# What travels with a model besides config and weights.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


OWN = "cutaway"  # the model_type of our own format


def save_folder(
    model: Transformer, folder: Path, source: Checkpoint | None = None, *, own: bool = False, verify: bool = True
) -> None:
    """Write config.json and safetensors, and copy the tokenizer's files from where the model came from.

    Every file appears whole or not at all, so saving over the folder that was loaded is safe.

    Args:
        model: what to save.
        folder: made if need be.
        source: the checkpoint it was loaded from.
        own: in our own format rather than that of the model's family.
        verify: read the weights back and compare every bit before they take their name.

    Raises:
        StorageError: the disk refused; what was there stays.
        ConfigError: the spec has no spelling in this format.
        RequestError: the model is of no family.
    """
    family = family_of(OWN if own else model.spec.family)
    if not own and family.model_type == OWN:
        hint = "save(model, path, format='cutaway') holds any model"
        raise RequestError("this model is of no Hugging Face family", field="format", expected=OWN, got="hf", hint=hint)
    config = config_of(family, model.spec)
    if family.architecture:
        config["architectures"] = [family.architecture]
    names = {number: name for name, number in DTYPES.items()}
    config.pop("torch_dtype", None)
    config["dtype"] = names[model.dtype]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise StorageError("folder cannot be made", path=folder, got=getattr(error, "strerror", error)) from error
    with torch.no_grad():
        tensors = saved(family.rules(model.spec), {name: t.detach() for name, t in model.state_dict().items()})
    save_sharded(folder, tensors, verify=verify)
    with atomic_write(folder / "config.json") as file:
        file.write(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    if source is not None and source.path.is_dir() and source.path.resolve() != folder.resolve():
        for name in COMPANIONS:
            if (source.path / name).is_file():
                with (source.path / name).open("rb") as old, atomic_write(folder / name) as new:
                    shutil.copyfileobj(old, new)


def config_of(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """The config of a spec, if its family can say all of it.

    Raises:
        ConfigError: something of the spec is not in the family's words, by its pointer.
    """
    hint = f"save(model, path, format={OWN!r}) holds any model"
    try:
        config = family.config(spec)
    except (AssertionError, AttributeError, LookupError, StopIteration) as error:
        what = f"is no {family.model_type} model"
        raise ConfigError(what, field="/family", got=spec.family, hint=hint) from error
    lost = difference(spec, family.read(ConfigReader(config, ignore=[key for key, _ in spec.kept])))
    if lost is not None:
        at, ours, theirs = lost
        raise ConfigError(
            f"a {family.model_type} config cannot say this", field=at, expected=theirs, got=ours, hint=hint
        )
    return config
