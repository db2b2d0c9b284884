"""A tokenizer as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from typing import Any

from cutaway.checkpoints.settings import settings_file
from cutaway.spec import GenerationSettings
from cutaway.tokenizers.rust import rust_errors
from cutaway.tokenizers.tokenizer import Tokenizer

__all__ = ["companions", "tokenizer_files"]


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """File name → contents, from which ``from_folder`` makes the same tokenizer.

    Errors: TokenizerError if the library cannot write its own object.
    """
    with rust_errors("the vocabulary cannot be written"):
        vocabulary = tokenizer.backend.to_str()
    by_id = {index: text for text, index in tokenizer.special.items()}

    def text_of(index: int | None) -> str | None:
        return None if index is None else by_id.get(index, tokenizer.backend.id_to_token(index))

    roles = {
        "bos_token": tokenizer.bos_id,
        "eos_token": next(iter(tokenizer.eos_ids), None),
        "pad_token": tokenizer.pad_id,
        "unk_token": tokenizer.unk_id,
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.adds_bos,
        **{name: text for name, index in roles.items() if (text := text_of(index)) is not None},
    }
    files = {
        "tokenizer.json": vocabulary.encode(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n",
    }
    if tokenizer.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.chat_template.source.encode()
    return files


def companions(tokenizer: Tokenizer | None, settings: GenerationSettings) -> dict[str, bytes]:
    """Tokenizer and settings as files, for a model that did not come from a folder."""
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    return files if settings == GenerationSettings() else {**files, "generation_config.json": settings_file(settings)}
