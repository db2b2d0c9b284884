"""Which file knows which family. Families are imported when they are met."""

from __future__ import annotations

import importlib

from cutaway.errors import UnsupportedModelError
from cutaway.families.family import Family

# model_type → file
_FILES = {
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "granite": "granite",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "stablelm": "stablelm",
}
# general.architecture of a GGUF → model_type
_GGUF = {"gemma3": "gemma3_text", "gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def known_families() -> list[str]:
    """Every ``model_type`` that can be loaded, sorted."""
    return sorted(_FILES)


def family_of(model_type: object, *, path: str | None = None) -> Family:
    """The family of a config's ``model_type``.

    Raises:
        UnsupportedModelError: missing, no string, or unknown; lists the known ones.
    """
    if not isinstance(model_type, str) or model_type not in _FILES:
        raise UnsupportedModelError(
            "unknown model type", path=path, field="/model_type", expected=", ".join(known_families()), got=model_type
        )
    family: Family = importlib.import_module(f"cutaway.families.{_FILES[model_type]}").FAMILY
    return family


def gguf_family(arch: object, *, path: str | None = None) -> Family:
    """The family of a GGUF's ``general.architecture``.

    Raises:
        UnsupportedModelError: missing, no string, or unknown; lists the known ones.
    """
    if not isinstance(arch, str) or arch not in _GGUF:
        raise UnsupportedModelError(
            "unknown architecture", path=path, field="general.architecture", expected=", ".join(sorted(_GGUF)), got=arch
        )
    return family_of(_GGUF[arch], path=path)
