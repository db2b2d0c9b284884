"""A model's file or folder opened for looking at: its spec and its table of tensors, but no weights."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutaway.checkpoints.folder import read_config
from cutaway.checkpoints.gguf import read_gguf
from cutaway.checkpoints.weights import by_plain_name
from cutaway.errors import NameNotFound, UnsupportedModelError
from cutaway.formats.gguf_names import gguf_rules
from cutaway.formats.gguf_split import open_gguf
from cutaway.formats.packed import Packed
from cutaway.formats.rules import WeightRule
from cutaway.formats.safetensors import DTYPES, SafetensorsFile
from cutaway.formats.shards import ShardedSafetensors
from cutaway.models import Transformer
from cutaway.spec import ModelSpec

if TYPE_CHECKING:
    from cutaway.checkpoints.resolve import Resolved
    from cutaway.tokenizers.tokenizer import Tokenizer

_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """One of the model's tensors, or, for a model cutaway does not know, one of the file's.

    Attributes:
        name: as people type it: the parameter's name without ``branches``, ``body`` and ``weight``.
        stored: the file's name.
        full: the parameter's whole name; the file's where there is no model.
        nbytes: in the file; a share of them where one stored tensor holds several.
    """

    name: str
    stored: str
    full: str
    shape: tuple[int, ...]
    type: str
    nbytes: int

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


@dataclass(slots=True)
class Source:
    """An open model.

    Attributes:
        spec: None where the family is not known.
        config: config.json, or a GGUF's key/values.
        parts: its tensors, in the order of the computation.
        left: names in the file that are no part of the model.
        missing: what the model would need and the file does not have.
    """

    resolved: Resolved
    spec: ModelSpec | None
    config: dict[str, Any]
    parts: list[Part]
    left: list[str]
    missing: list[str]
    read: Callable[[str], Tensor]
    rules: list[WeightRule] = field(default_factory=list)
    problem: str = ""  # why there is no spec
    types: Callable[[str], str] | None = None  # of a GGUF's key/values

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if it has none."""
        from cutaway.tokenizers.gguf import from_gguf, has_vocabulary
        from cutaway.tokenizers.load import from_folder

        path, rows = self.resolved.path, None if self.spec is None else self.spec.vocab_size
        if self.types is None:
            return from_folder(path if path.is_dir() else path.parent, vocab_rows=rows)
        if not has_vocabulary(self.config):
            return None
        return from_gguf(self.config, self.types, vocab_rows=rows, path=str(path))

    def part(self, name: str) -> Part:
        """A tensor by the file's name, ours in full, or ours as `Part` has it.

        Raises:
            NameNotFound: there is none; the hint has the nearest names.
        """
        for part in self.parts:
            if name in (part.name, part.full):
                return part
        stored = [part for part in self.parts if part.stored == name]
        if len(stored) == 1:
            return stored[0]
        names = [*(part.name for part in self.parts), *(part.stored for part in self.parts)]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        what = "several of the model's tensors are stored in this one" if stored else "no tensor has this name"
        near = [part.name for part in stored] or near
        hint = f"did you mean {' or '.join(near)}?" if near else "`cutaway show MODEL -v` lists them"
        raise NameNotFound(what, path=self.resolved.path, field=name, hint=hint)

    def tensor(self, part: Part) -> Tensor:
        """A tensor's numbers, as the model would have them."""
        for rule in self.rules:
            if part.full in rule.ours:
                given = rule.load(tuple(self.read(name) for name in self._stored(rule)))
                return given[rule.ours.index(part.full)]
        return self.read(part.stored)

    def _stored(self, rule: WeightRule) -> list[str]:
        """The file's names for a rule's."""
        by_full = {part.full: part.stored for part in self.parts}
        return [by_full[rule.ours[0]]] if len(rule.theirs) == 1 else list(rule.theirs)


def short(name: str) -> str:
    """
    >>> short("decoder.layers.0.branches.attn.body.q.weight"), short("decoder.norm.weight")
    ('decoder.layers.0.attn.q', 'decoder.norm')
    """
    return name.replace(".branches.", ".").replace(".body.", ".").removesuffix(".weight")


@contextmanager
def open_source(resolved: Resolved) -> Iterator[Source]:
    """Open a model's file or folder.

    Raises:
        CutawayError: it cannot be read. A family that cutaway does not have is no error: then there is no spec.
    """
    with ExitStack() as stack:
        if resolved.kind == "gguf":
            yield _gguf(resolved, stack)
        else:
            yield _safetensors(resolved, stack)


def _gguf(resolved: Resolved, stack: ExitStack) -> Source:
    file = open_gguf(resolved.path)
    stack.callback(file.close)
    tensors = {t.name: Part(t.name, t.name, t.name, t.shape, t.type.name, t.nbytes) for t in file.tensors.values()}
    metadata: dict[str, Any] = dict(file.metadata)
    try:
        family, spec, _ = read_gguf(file, str(resolved.path))
    except UnsupportedModelError as error:
        return _unknown(resolved, metadata, tensors, file.read, error.line(), file.type_of)
    assert family.gguf is not None
    own = _parameters(spec)
    rules = gguf_rules(spec, list(own), family.gguf.alter(spec))
    return _known(
        resolved, spec, metadata, tensors, own, rules, {name: name for name in tensors}, file.read, file.type_of
    )


def _safetensors(resolved: Resolved, stack: ExitStack) -> Source:
    single = resolved.kind == "safetensors"
    folder = resolved.path.parent if single else resolved.path
    file: SafetensorsFile | ShardedSafetensors
    file = SafetensorsFile(resolved.path) if single else ShardedSafetensors(folder)
    stack.callback(file.close)
    tensors, packed = {}, Packed(file)
    for name in file.names():
        info = file.info(name)
        kind = packed.kinds[name][0].name if name in packed.kinds else _TYPE_NAMES[info.dtype]
        tensors[name] = Part(name, name, name, packed.shape(name), kind, info.nbytes)
    if single and not (folder / "config.json").exists():
        return _unknown(resolved, {}, tensors, packed.read, "there is no config.json beside it", None)
    try:
        family, spec, _, config = read_config(folder)
    except UnsupportedModelError as error:
        return _unknown(resolved, {}, tensors, packed.read, error.line(), None)
    plain = by_plain_name(tensors, family.base_prefix)
    return _known(resolved, spec, config, tensors, _parameters(spec), family.rules(spec), plain, packed.read, None)


def _parameters(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Transformer(spec)
    return {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}


def _unknown(
    resolved: Resolved,
    config: dict[str, Any],
    tensors: dict[str, Part],
    read: Callable[[str], Tensor],
    problem: str,
    types: Callable[[str], str] | None,
) -> Source:
    return Source(resolved, None, config, list(tensors.values()), [], [], read, problem=problem, types=types)


def _known(
    resolved: Resolved,
    spec: ModelSpec,
    config: dict[str, Any],
    tensors: dict[str, Part],
    own: dict[str, tuple[int, ...]],
    rules: list[WeightRule],
    plain: dict[str, str],
    read: Callable[[str], Tensor],
    types: Callable[[str], str] | None,
) -> Source:
    found: dict[str, Part] = {}
    missing: list[str] = []
    used: set[str] = set()
    for rule in rules:
        names = [plain[name] for name in rule.theirs if name in plain]
        used.update(names)
        if not rule.ours:
            continue
        missing += [name for name in rule.theirs if name not in plain]
        if not names:
            continue
        whole = sum(prod(own[name]) for name in rule.ours)
        size, kinds = sum(tensors[name].nbytes for name in names), {tensors[name].type for name in names}
        for name in rule.ours:
            shape = own[name]
            share = size * prod(shape) // whole
            found[name] = Part(short(name), names[0], name, shape, "/".join(sorted(kinds)), share)
    parts = [found[name] for name in own if name in found]
    left = [name for name in tensors if name not in used]
    return Source(resolved, spec, config, parts, left, missing, read, rules=rules, types=types)
