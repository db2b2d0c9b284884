"""A folder of weights: one safetensors file, or several with an index.

::

    model.safetensors                        or    model.safetensors.index.json
                                                   model-00001-of-00002.safetensors
                                                   model-00002-of-00002.safetensors

The index is ``{"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}``
(https://huggingface.co/docs/transformers/big_models).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from cutaway.errors import (
    FormatError,
    LimitExceeded,
    RequestError,
    ShapeMismatch,
    ShardError,
    StorageError,
    UnsafeFormatError,
)
from cutaway.formats.files import Progress, StrPath, atomic_write, pointer, read_json, resolve_inside
from cutaway.formats.safetensors import SafetensorsFile, TensorInfo, check_storable, write_safetensors

__all__ = ["INDEX", "SINGLE", "ShardedSafetensors", "save_sharded"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX = 64 << 20  # bytes of JSON
MAX_SHARDS = 10_000
MAX_LISTED = 1 << 16  # files looked at in a folder
_OURS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class ShardedSafetensors:
    """All tensors of a folder, read like one `SafetensorsFile`.

    ``model.safetensors`` wins over an index, as it does elsewhere. Every shard's header is
    checked at once; ``metadata`` joins their free texts.

    Errors: ShardError with the place in the index where the parts do not fit together,
    UnsafeFormatError where there are only pickles, and those of `SafetensorsFile`.
    """

    def __init__(self, folder: StrPath, *, mmap: bool = False) -> None:
        self.path = os.fspath(folder)
        self.metadata: dict[str, str] = {}
        self._shards: dict[str, SafetensorsFile] = {}
        self._home: dict[str, SafetensorsFile] = {}
        try:
            self._open(_listing(self.path), mmap)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every shard. Tensors already read stay valid."""
        for shard in self._shards.values():
            shard.close()

    def names(self) -> list[str]:
        """The tensors, shard by shard."""
        return list(self._home)

    def info(self, name: str) -> TensorInfo:
        """Type and shape of a tensor, and its place in its own shard. ShapeMismatch if there is none."""
        return self._shard(name).info(name)

    def read(self, name: str, *, progress: Progress | None = None) -> torch.Tensor:
        """One tensor as stored; see `SafetensorsFile.read`."""
        return self._shard(name).read(name, progress=progress)

    def count_nonfinite(self) -> dict[str, int]:
        """How many numbers of each tensor are NaN or infinite; tensors without any are left out."""
        return {name: n for shard in self._shards.values() for name, n in shard.count_nonfinite().items()}

    def _shard(self, name: str) -> SafetensorsFile:
        if name not in self._home:
            raise ShapeMismatch("tensor is missing", path=self.path, field=name)
        return self._home[name]

    def _open(self, listed: list[str], mmap: bool) -> None:
        # A folder from a file system that tells cases apart may land on one that does not.
        for wanted in (SINGLE, INDEX):
            alike = [name for name in listed if name.casefold() == wanted]
            if alike and alike != [wanted]:
                raise ShardError("file name is ambiguous", path=self.path, expected=wanted, got=", ".join(alike))
        if SINGLE in listed:
            if INDEX in listed:
                warnings.warn(f"{self.path}: {SINGLE} is read, {INDEX} beside it is not", stacklevel=4)
            self._add(SINGLE, mmap, None)
            return
        if INDEX not in listed:
            self._refuse_empty(listed)
        index = resolve_inside(self.path, INDEX)
        tree = read_json(index, limit=MAX_INDEX, error=ShardError)
        placed = tree.get("weight_map") if isinstance(tree, dict) else None
        if not isinstance(tree, dict) or not isinstance(placed, dict) or not placed:
            raise ShardError("is not a list of places", path=index, field="/weight_map", expected="{tensor: file}")
        first: dict[str, str] = {}
        for tensor, shard in placed.items():
            if not isinstance(shard, str):
                raise ShardError("is not a file name", path=index, field=pointer("weight_map", tensor), got=shard)
            first.setdefault(shard, pointer("weight_map", tensor))
        if len(first) > MAX_SHARDS:
            raise LimitExceeded("too many shards", path=index, expected=f"at most {MAX_SHARDS}", got=len(first))
        if len({shard.casefold() for shard in first}) < len(first):
            raise ShardError("shard names differ only in case", path=index, field="/weight_map")
        for shard, field in first.items():
            self._add(shard, mmap, field)
        for tensor, shard in placed.items():
            if self._home.get(tensor) is not self._shards[str(shard)]:
                field = pointer("weight_map", tensor)
                raise ShardError("tensor is not in its shard", path=index, field=field, got=shard)
        self._warn(index, tree, placed, listed)

    def _add(self, shard: str, mmap: bool, field: str | None) -> None:
        if not resolve_inside(self.path, shard, field=field).exists():
            raise ShardError("shard is missing", path=self.path, field=field, expected=shard)
        file = self._shards[shard] = SafetensorsFile(os.path.join(self.path, shard), mmap=mmap)
        for name in file.names():
            if name in self._home:
                both = f"{os.path.basename(self._home[name].path)} and {shard}"
                raise ShardError("tensor is in two shards", path=self.path, field=name, got=both)
            self._home[name] = file
        self.metadata |= file.metadata

    def _refuse_empty(self, listed: list[str]) -> None:
        pickles = [name for name in listed if name.endswith(_PICKLES)]
        if pickles:
            hint = "convert it to safetensors where you trust it; cutaway never unpickles"
            raise UnsafeFormatError("has only pickled weights", path=self.path, got=pickles[0], hint=hint)
        raise ShardError("has no weights", path=self.path, expected=f"{SINGLE} or {INDEX}")

    def _warn(self, index: Path, tree: Mapping[str, object], placed: Mapping[str, object], listed: list[str]) -> None:
        notes = []
        extra = [name for name in listed if name.endswith(".safetensors") and name not in self._shards]
        if extra:
            notes.append(f"{len(extra)} safetensors files are not in the index and not read: {extra[:5]!r:.300}")
        unlisted = [name for name in self._home if name not in placed]
        if unlisted:
            notes.append(f"{len(unlisted)} tensors are in a shard but not in the index: {unlisted[:5]!r:.300}")
        metadata = tree.get("metadata")
        claimed = metadata.get("total_size") if isinstance(metadata, dict) else None
        size = sum(self.info(name).nbytes for name in self._home)
        if claimed is not None and claimed != size:
            notes.append(f"/metadata/total_size is {claimed!r:.40}, but the tensors take {size} bytes")
        for note in notes:
            warnings.warn(f"{index}: {note}", stacklevel=5)


def _listing(folder: str) -> list[str]:
    """The names in a folder, sorted; a huge folder is refused rather than walked."""
    names: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) > MAX_LISTED:
                    raise LimitExceeded("folder holds too many files", path=folder, expected=f"at most {MAX_LISTED}")
    except NotADirectoryError as error:
        raise FormatError("is not a folder", path=folder) from error
    except (OSError, ValueError) as error:
        raise StorageError("cannot be listed", path=folder, got=getattr(error, "strerror", error)) from error
    return sorted(names)


def save_sharded(
    folder: StrPath,
    tensors: Mapping[str, torch.Tensor],
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
    verify: bool = True,
    ready: Callable[[], None] = lambda: None,
) -> list[str]:
    """Write tensors as ``model.safetensors``, or as shards of at most ``max_shard_bytes`` and an index.

    A tensor larger than that gets a shard of its own. ``metadata`` defaults to ``{"format": "pt"}``,
    which transformers asks for. Returns the names of the files. All are written under other
    names first and then renamed, the index last; weights of an earlier save that do not belong
    to this one are removed after that. A crash between two renames can leave shards of both:
    who cannot bear that writes into a new folder, or leaves a mark when ``ready`` is called, just before the
    first of them. Errors: those of `save_safetensors`.
    """
    if max_shard_bytes < 1:
        raise RequestError("is not a size", field="max_shard_bytes", expected="at least 1", got=max_shard_bytes)
    check_storable(folder, tensors)
    groups: list[dict[str, torch.Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if groups[-1] and tensor.nbytes > room:
            groups.append({})
            room = max_shard_bytes
        groups[-1][name] = tensor
        room -= tensor.nbytes
    count = len(groups)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
    texts = {"format": "pt"} if metadata is None else metadata
    total = sum(tensor.nbytes for tensor in tensors.values())
    home = Path(folder)
    with contextlib.ExitStack() as stack:  # renames in reverse: what is entered first appears last
        if count > 1:
            places = {name: file for file, group in zip(names, groups, strict=True) for name in group}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            file = stack.enter_context(atomic_write(home / INDEX, expect=total))
            file.write(json.dumps(index, indent=2, ensure_ascii=False).encode())
        for name, group in zip(names, groups, strict=True):
            write_safetensors(stack.enter_context(atomic_write(home / name)), group, texts, home / name, verify)
        ready()
    written = [*names, INDEX] if count > 1 else names
    for name in _listing(os.fspath(folder)):
        if (name in (SINGLE, INDEX) or _OURS.fullmatch(name)) and name not in written:
            try:
                os.unlink(home / name)
            except OSError as error:
                raise StorageError("older weights cannot be removed", path=home / name, got=error.strerror) from error
    return written
