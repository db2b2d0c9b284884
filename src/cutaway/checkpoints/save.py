"""Giving a model back as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from cutaway.checkpoints.load import DTYPES, Checkpoint
from cutaway.errors import StorageError
from cutaway.families import family_of
from cutaway.formats.files import atomic_write
from cutaway.formats.rules import saved
from cutaway.formats.shards import save_sharded
from cutaway.models import Transformer

# What travels with a model besides config and weights.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def save_folder(model: Transformer, folder: Path, source: Checkpoint | None = None) -> None:
    """Write config.json and safetensors, and copy the tokenizer's files from where the model came from.

    Every file appears whole or not at all, so saving over the folder that was loaded is safe.

    Args:
        model: what to save.
        folder: made if need be.
        source: the checkpoint it was loaded from.

    Raises:
        StorageError: the disk refused; what was there stays.
        ConfigError: the spec has no spelling in this format.
    """
    family = family_of(model.spec.family)
    config = {"architectures": [family.architecture], **family.config(model.spec)}
    names = {number: name for name, number in DTYPES.items()}
    config.pop("torch_dtype", None)
    config["dtype"] = names[model.dtype]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise StorageError("folder cannot be made", path=folder, got=getattr(error, "strerror", error)) from error
    with torch.no_grad():
        tensors = saved(family.rules(model.spec), {name: t.detach() for name, t in model.state_dict().items()})
    save_sharded(folder, tensors)
    with atomic_write(folder / "config.json") as file:
        file.write(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    if source is not None and source.path.is_dir() and source.path.resolve() != folder.resolve():
        for name in COMPANIONS:
            if (source.path / name).is_file():
                with (source.path / name).open("rb") as old, atomic_write(folder / name) as new:
                    shutil.copyfileobj(old, new)
