"""What a family's file provides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import WeightRule
from cutaway.spec import ModelSpec


@dataclass(frozen=True)
class GgufForm:
    """How a family lies in a GGUF file, where that differs from the common vocabulary.

    Attributes:
        arch: the file's ``general.architecture``.
        keys: metadata key after the architecture's prefix → config key, beside the common ones.
        complete: turns the translated config into what ``read`` expects (constants the format leaves out).
        alter: rules that replace the common one for the tensors they name.
        express: the inverse of ``complete``, for a config that is to be written; may refuse.
        factors: whether llama.cpp reads a list of rotary factors (``rope_freqs``) for this family.
    """

    arch: str
    keys: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[dict[str, Any], Mapping[str, Any]], None] = lambda config, metadata: None
    alter: Callable[[ModelSpec], list[WeightRule]] = lambda spec: []
    express: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    factors: bool = False


class Stored(Protocol):
    """Tensors of a file, under the names that rules give them."""

    def names(self) -> list[str]: ...
    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Family:
    """A family: config → spec → config, and tensors → tensors.

    Attributes:
        model_type: the config's word for it.
        architecture: the class name that a saved config states.
        read: a config as a spec; must read every key that matters.
        write: the inverse of ``read``, without the kept keys.
        rules: the tensors of a Hugging Face folder.
        base_prefix: what names start with unless the body was saved without its head.
        gguf: its form in GGUF, if it has one.
        settle: what a folder's tensors say of a spec where its config leaves something open.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigReader], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]]
    rules: Callable[[ModelSpec], list[WeightRule]]
    base_prefix: str = "model."
    gguf: GgufForm | None = None
    settle: Callable[[ModelSpec, Stored], ModelSpec] = lambda spec, stored: spec

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        """The whole config of a spec, with what was kept. ``read(config(spec)) == spec``."""
        out = {"model_type": self.model_type, **self.write(spec)}
        for key, text in spec.kept:
            section, _, inner = key.rpartition("/")
            if section in out:  # "attn_config/attn_impl" is a key of a section
                out[section] = {**out[section], inner: json.loads(text)}
            else:
                out[key] = json.loads(text)
        return out
