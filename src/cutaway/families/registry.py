"""Which file knows which family. Families are imported when they are met."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from cutaway.errors import UnsupportedModelError
from cutaway.families.family import Family

# model_type → file
_FILES = {
    "bart": "bart",
    "bert": "bert",
    "bloom": "bloom",
    "distilbert": "distilbert",
    "falcon": "falcon",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gptj": "gptj",
    "granite": "granite",
    "llama": "llama",
    "marian": "marian",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "modernbert": "modernbert",
    "mpt": "mpt",
    "olmo2": "olmo2",
    "phi": "phi",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "roberta": "roberta",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "t5": "t5",
}
_OWN = {"cutaway": "cutaway"}  # our own format, which holds a model of any family
# general.architecture of a GGUF → model_type
_GGUF = {
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}
_GGUF_EXPERTS = {"llama": "mixtral"}  # the same of files with experts, where these have no name of their own


def known_families() -> list[str]:
    """Every other people's ``model_type`` that can be loaded, sorted."""
    return sorted(_FILES)


def family_of(model_type: object, *, path: str | None = None) -> Family:
    """The family of a config's ``model_type``.

    Raises:
        UnsupportedModelError: missing, no string, or unknown; lists the known ones.
    """
    files = _FILES | _OWN
    if not isinstance(model_type, str) or model_type not in files:
        raise UnsupportedModelError(
            "unknown model type", path=path, field="/model_type", expected=", ".join(sorted(files)), got=model_type
        )
    family: Family = importlib.import_module(f"cutaway.families.{files[model_type]}").FAMILY
    return family


def gguf_family(metadata: Mapping[str, Any], *, path: str | None = None) -> Family:
    """The family of a GGUF: by its ``general.architecture``, and whether it has experts.

    Raises:
        UnsupportedModelError: missing, no string, or unknown; lists the known ones.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _GGUF:
        raise UnsupportedModelError(
            "unknown architecture", path=path, field="general.architecture", expected=", ".join(sorted(_GGUF)), got=arch
        )
    experts = _GGUF_EXPERTS if metadata.get(f"{arch}.expert_count") else {}
    return family_of(experts.get(arch, _GGUF[arch]), path=path)
