"""GGUF models in several files: ``name-00001-of-00003.gguf`` and its fellows.

The first part has the metadata; each says in ``split.no`` and ``split.count`` which it is, and
``split.tensors.count`` how many tensors there are in all. Made by llama.cpp's gguf-split:
https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split
"""

from __future__ import annotations

import os
import re
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from cutaway.errors import ShapeMismatch, ShardError
from cutaway.formats.files import Progress, StrPath, resolve_inside
from cutaway.formats.gguf import GgufFile, GgufTensor, GgufValue

__all__ = ["SplitGguf", "open_gguf"]

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def open_gguf(path: StrPath, *, mmap: bool = False) -> GgufFile | SplitGguf:
    """Open a GGUF model, all parts of it if ``path`` is the first of several.

    Errors: those of `GgufFile`; ShardError where parts are missing or do not fit together, and
    for a part that is not the first.
    """
    first = GgufFile(path, mmap=mmap)
    try:
        alone = _integer(first, "split.count", 1) <= 1
    except ShardError:
        first.close()
        raise
    if alone:
        return first
    first.close()
    return SplitGguf(path, mmap=mmap)


def _integer(part: GgufFile, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if not isinstance(value, int):
        raise ShardError("is no number", path=part.path, field=key, expected="an integer", got=part.type_of(key))
    return value


class SplitGguf:
    """A model in several GGUF files, read like one `GgufFile`; ``metadata`` is the first part's."""

    def __init__(self, path: StrPath, *, mmap: bool = False) -> None:
        self.path = os.fspath(path)
        self.parts: list[GgufFile] = []
        self._home: dict[str, GgufFile] = {}
        try:
            for i, name in enumerate(self._names()):
                self._add(i, name, mmap)
            self._check_total()
        except BaseException:
            self.close()
            raise
        self.metadata: dict[str, GgufValue] = self.parts[0].metadata
        self.tensors: dict[str, GgufTensor] = {name: part.tensors[name] for name, part in self._home.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every part. Tensors already read stay valid."""
        for part in self.parts:
            part.close()

    def type_of(self, key: str) -> str:
        """The declared type of a value; see `GgufFile.type_of`."""
        return self.parts[0].type_of(key)

    def names(self) -> list[str]:
        """The tensors, part by part."""
        return list(self.tensors)

    def info(self, name: str) -> GgufTensor:
        """Type and shape of a tensor, and its place in its own part. ShapeMismatch if there is none."""
        return self._part(name).info(name)

    def raw(self, name: str, *, progress: Progress | None = None) -> npt.NDArray[np.uint8]:
        """The stored bytes; see `GgufFile.raw`."""
        return self._part(name).raw(name, progress=progress)

    def read(self, name: str, dtype: torch.dtype = torch.float32, *, progress: Progress | None = None) -> torch.Tensor:
        """One tensor as plain numbers; see `GgufFile.read`."""
        return self._part(name).read(name, dtype, progress=progress)

    def count_nonfinite(self) -> dict[str, int]:
        """How many weights of each tensor are NaN or infinite; tensors without any are left out."""
        return {name: n for part in self.parts for name, n in part.count_nonfinite().items()}

    def _part(self, name: str) -> GgufFile:
        if name not in self._home:
            raise ShapeMismatch("tensor is missing", path=self.path, field=name)
        return self._home[name]

    def _names(self) -> list[str]:
        """The file names of all parts, from that of the first."""
        base = os.path.basename(self.path)
        match = _NAME.fullmatch(base)
        if match is None:
            raise ShardError(
                "is a part of a model but not named so", path=self.path, expected="…-00001-of-0000N.gguf", got=base
            )
        stem, number, count = match.groups()
        if int(number) != 1:
            first = f"{stem}-00001-of-{count}.gguf"
            raise ShardError("is not the first part", path=self.path, expected=first, hint=f"open {first}")
        return [f"{stem}-{i:05d}-of-{count}.gguf" for i in range(1, int(count) + 1)]

    def _add(self, i: int, name: str, mmap: bool) -> None:
        folder = os.path.dirname(self.path) or "."
        if not resolve_inside(folder, name).exists():
            raise ShardError("part is missing", path=folder, expected=name)
        part = GgufFile(os.path.join(folder, name), mmap=mmap)
        self.parts.append(part)
        for key, expected in (("split.no", i), ("split.count", len(self._names()))):
            got = _integer(part, key, -1)
            if got != expected:
                raise ShardError("part does not fit its name", path=part.path, field=key, expected=expected, got=got)
        arch = "general.architecture"
        ours, theirs = self.parts[0].metadata.get(arch), part.metadata.get(arch)
        if theirs is not None and not (isinstance(theirs, str) and isinstance(ours, str) and theirs == ours):
            raise ShardError("part is of another model", path=part.path, field=arch, expected=ours, got=theirs)
        for tensor in part.names():
            if tensor in self._home:
                both = f"{os.path.basename(self._home[tensor].path)} and {name}"
                raise ShardError("tensor is in two parts", path=folder, field=tensor, got=both)
            self._home[tensor] = part

    def _check_total(self) -> None:
        key = "split.tensors.count"
        for part in self.parts:
            total = _integer(part, key, len(self._home))
            if total != len(self._home):
                raise ShardError("tensors are missing", path=part.path, field=key, expected=total, got=len(self._home))
