"""A tokenizer as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from typing import Any

from cutaway.checkpoints.settings import settings_file
from cutaway.spec import GenerationSettings
from cutaway.tokenizers.around import around_of
from cutaway.tokenizers.rust import rust_errors
from cutaway.tokenizers.tokenizer import Tokenizer

__all__ = ["companions", "tokenizer_files"]


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """File name → contents, from which ``from_folder`` makes the same tokenizer.

    Errors: TokenizerError if the library cannot write its own object.
    """
    files = dict(tokenizer.files) or _library_files(tokenizer)
    if tokenizer.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.chat_template.source.encode()
    return files


def _library_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    with rust_errors("the vocabulary cannot be written"):
        vocabulary = tokenizer.backend.to_str()
    by_id = {index: text for text, index in tokenizer.special.items()}

    def text_of(index: int | None) -> str | None:
        return None if index is None else by_id.get(index, tokenizer.backend.id_to_token(index))

    named = "bos_token" in tokenizer.names or tokenizer.bos_id != tokenizer.cls_id
    roles = {
        "bos_token": tokenizer.bos_id if named else None,
        "eos_token": next(iter(tokenizer.eos_ids), None),
        "pad_token": tokenizer.pad_id,
        "unk_token": tokenizer.unk_id,
        "sep_token": tokenizer.sep_id,
        "cls_token": tokenizer.cls_id,
        "mask_token": tokenizer.mask_id,
    }
    # What stands around a text is tokenizer.json's affair, unless other files have said otherwise.
    around = tokenizer.around
    flags = {} if around_of(tokenizer.backend) == around else {"add_bos_token": tokenizer.adds_bos}
    flags |= {"add_eos_token": True} if flags and around.after else {}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": tokenizer.tidies,
        **flags,
        **{name: text for name, index in roles.items() if (text := text_of(index)) is not None},
    }
    return {
        "tokenizer.json": vocabulary.encode(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n",
    }


def companions(tokenizer: Tokenizer | None, settings: GenerationSettings) -> dict[str, bytes]:
    """Tokenizer and settings as files, for a model that did not come from a folder."""
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    return files if settings == GenerationSettings() else {**files, "generation_config.json": settings_file(settings)}
