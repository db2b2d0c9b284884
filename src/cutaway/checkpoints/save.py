"""Giving a model back as a folder: Hugging Face's, or our own, which holds any spec."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutaway.checkpoints.folder import UNFINISHED
from cutaway.checkpoints.load import DTYPES, Checkpoint
from cutaway.checkpoints.quantised import Losses, Target, planned
from cutaway.checkpoints.sentence import FILES
from cutaway.checkpoints.weights import matrices, quantizable
from cutaway.errors import ConfigError, RequestError, StorageError
from cutaway.families import Family, family_of
from cutaway.formats.config import ConfigReader
from cutaway.formats.files import atomic_write, sweep
from cutaway.formats.gguf_write import PLAIN_TYPES
from cutaway.formats.mixes import Mix
from cutaway.formats.packed import packed_text
from cutaway.formats.quants import BlockType
from cutaway.formats.rules import saved
from cutaway.formats.shards import save_sharded
from cutaway.kernels import Stored
from cutaway.models import Transformer
from cutaway.spec import ModelSpec
from cutaway.spec.serial import difference

# What travels with a model besides config and weights.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "source.spm",
    "target_vocab.json",
    "target.spm",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


OWN = "cutaway"  # the model_type of our own format


def save_folder(
    model: Transformer,
    folder: Path,
    source: Checkpoint | None = None,
    companions: Mapping[str, bytes] | None = None,
    *,
    also: Mapping[str, bytes] | None = None,
    own: bool = False,
    quantize: Mix | None = None,
    verify: bool = True,
    losses: Losses | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write config.json and safetensors, and copy the tokenizer's files from where the model came from.

    Every file appears whole or not at all, and a folder whose save was cut short says so when it is loaded, so
    saving over the folder that was loaded is safe: what comes of it is the old model, the new one, or an error.

    Args:
        model: what to save.
        folder: made if need be.
        source: the checkpoint it was loaded from.
        companions: the files of tokenizer and settings, where the source has none to copy.
        also: files that are written in any case: what is said of sentence vectors.
        own: in our own format rather than that of the model's family. It keeps stored blocks as they are.
        quantize: what matrices become, in our own format.
        verify: read the weights back and compare every bit before they take their name.
        losses: told what became of each matrix.
        progress: told (numbers done, numbers in all) while they are quantized.

    Raises:
        StorageError: the disk refused; what was there stays.
        ConfigError: the spec has no spelling in this format.
        DtypeError: a number that a block cannot hold.
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
    marker = folder / UNFINISHED

    def mark() -> None:
        with atomic_write(marker) as file:
            file.write(b"A save into this folder has not finished. Save again.\n")

    texts = {"format": "pt"}  # which transformers asks for
    if own:
        tensors, kinds = _blocks(model, family, quantize, losses, progress)
        texts = packed_text(kinds) or texts  # the library writes two entries in any order
    else:
        with torch.no_grad():
            tensors = saved(family.rules(model.spec), {name: t.detach() for name, t in model.state_dict().items()})
    _make_room(folder, sum(tensor.nbytes for tensor in tensors.values()))
    # Everything is written under other names first; from the mark on, there are only renames.
    with contextlib.ExitStack() as renames:
        file = renames.enter_context(atomic_write(folder / "config.json"))
        file.write(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n")
        stale = _write_companions(renames, folder, source, companions or {}, also or {})
        save_sharded(folder, tensors, metadata=texts, verify=verify, ready=mark)
    for path in stale:
        path.unlink(missing_ok=True)
    sweep(folder)
    marker.unlink()


def _make_room(folder: Path, nbytes: int) -> None:
    """A folder on a disk with so much space; none where there is less.

    Raises:
        StorageError: it cannot be made, or the disk is too full.
    """
    try:
        there = folder.absolute()
        while not there.exists() and there != there.parent:
            there = there.parent
        if (free := shutil.disk_usage(there).free) < nbytes:
            raise StorageError("disk is too full", path=folder, expected=f"{nbytes} bytes free", got=free)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise StorageError("folder cannot be made", path=folder, got=getattr(error, "strerror", error)) from error


def _blocks(
    model: Transformer,
    family: Family,
    mix: Mix | None,
    losses: Losses | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[dict[str, Tensor], dict[str, tuple[BlockType, int]]]:
    """The tensors of our own format, and type and width of those that are rows of bytes."""
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    to = Target(mix, PLAIN_TYPES[model.dtype])
    tensors, kinds = dict[str, Tensor](), dict[str, tuple[BlockType, int]]()
    wide = matrices(model) if mix is None else quantizable(model)
    total, done = sum(tensor.numel() for tensor in own.values()), 0
    for rule in family.rules(model.spec):
        (name,) = rule.ours
        tensor = own[name]
        tensors[name] = tensor
        if name in wide and (mix is not None or isinstance(tensor, Stored)):
            matrix = planned(rule, 0, name, tuple(tensor.shape), (tensor,), model.spec, to)
            made = matrix.make((tensor,), losses)
            if matrix.type is not to.plain or matrix.kept:
                kinds[name], tensors[name] = (matrix.type, matrix.cols), made
        done += tensor.numel()
        if progress is not None:
            progress(done, total)
    return tensors, kinds


def _write_companions(
    renames: contextlib.ExitStack,
    folder: Path,
    source: Checkpoint | None,
    companions: Mapping[str, bytes],
    also: Mapping[str, bytes],
) -> list[Path]:
    """Copy or write them, and name those of another model that lie there."""
    same = False
    if source is not None and source.path.is_dir():
        same = source.path.resolve() == folder.resolve()
        companions = {name: (source.path / name).read_bytes() for name in COMPANIONS if (source.path / name).is_file()}
    for name, data in {**({} if same else companions), **also}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        renames.enter_context(atomic_write(folder / name)).write(data)
    return [folder / name for name in (*COMPANIONS, *FILES) if name not in {**companions, **also}]


class _Names:
    """What a save will store, by name."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def names(self) -> list[str]:
        return self._names

    def read(self, name: str) -> torch.Tensor:
        raise LookupError(name)  # a config that contradicts its tensors is not one that we wrote


def config_of(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """The config of a spec, if its family can say all of it.

    Raises:
        ConfigError: something of the spec is not in the family's words, by its pointer.
    """
    hint = f"save(model, path, format={OWN!r}) holds any model"
    try:
        config = family.config(spec)
        names = [name for rule in family.rules(spec) if rule.ours for name in rule.theirs]
    except (AssertionError, AttributeError, LookupError, StopIteration) as error:
        what = f"is no {family.model_type} model"
        raise ConfigError(what, field="/family", got=spec.family, hint=hint) from error

    def again() -> ModelSpec:
        read = family.read(ConfigReader(config, ignore=[key for key, _ in spec.kept]))
        return family.settle(read, _Names(names))

    lost = difference(spec, again())
    if lost is not None:  # what was kept may be of another head than the model has by now: the spec has the last word
        config |= family.write(spec)
        back = again()
        lost = difference(replace(spec, kept=back.kept), back)
    if lost is not None:
        at, ours, theirs = lost
        raise ConfigError(
            f"a {family.model_type} config cannot say this", field=at, expected=theirs, got=ours, hint=hint
        )
    return config
