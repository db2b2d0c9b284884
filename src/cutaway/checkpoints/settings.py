"""What ``generation_config.json`` says, as defaults for generating."""

from __future__ import annotations

import json
import warnings
from typing import Any

from cutaway.formats.config import ConfigReader
from cutaway.spec import GenerationSettings

# Settings that change what is generated and are not followed here: key → the value that changes nothing.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, None),
    "encoder_repetition_penalty": (1.0, None),
    "no_repeat_ngram_size": (0, None),
    "num_beams": (1, None),
    "num_beam_groups": (1, None),
    "min_p": (0.0, None),
    "typical_p": (1.0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "diversity_penalty": (0.0, None),
    "penalty_alpha": (0.0, None),
    "bad_words_ids": ([], None),
    "force_words_ids": ([], None),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": ([], None),
    "begin_suppress_tokens": ([], None),
    "min_length": (0, None),
    "min_new_tokens": (0, None),
    "guidance_scale": (1.0, None),
    "sequence_bias": ({}, None),
}


def token_ids(c: ConfigReader, key: str, vocab_size: int) -> tuple[int, ...]:
    """A token id, a list of them, or nothing, each checked against the vocabulary."""
    value = None if c.ignores(key) else c.raw(key, None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            error = c.error(key, "not a token of this vocabulary", expected=f"0…{vocab_size - 1}", got=token)
            error.hint = f"Correct it, or leave it unread: load with ignore=({key!r},)."
            raise error
    return tuple(ids)


def read_settings(config: ConfigReader, generation: ConfigReader | None, vocab_size: int) -> GenerationSettings:
    """Defaults of a checkpoint. What ends an answer is the union of what both files name.

    Raises:
        ConfigError: a token outside the vocabulary, or a value out of range.
    """
    eos = token_ids(config, "eos_token_id", vocab_size)
    for key in ("bos_token_id", "pad_token_id"):
        if config.raw(key, None) != -1:  # some configs say −1 for "none"
            token_ids(config, key, vocab_size)
    if generation is None:
        return GenerationSettings(eos_ids=_union(eos))
    more = token_ids(generation, "eos_token_id", vocab_size)
    if more and not set(eos) <= set(more):
        warnings.warn(
            f"config and generation_config name different end tokens ({list(eos)}, {list(more)}); all end an answer",
            stacklevel=2,
        )
    for key in ("bos_token_id", "pad_token_id"):
        token_ids(generation, key, vocab_size)
    temperature = generation.number("temperature", 1.0, low=0)
    top_k = generation.integer("top_k", 50, low=0, high=1 << 40)
    top_p = generation.number("top_p", 1.0, low=0, high=1)
    ignored = sorted(
        key
        for key, neutral in _NOT_FOLLOWED.items()
        if (value := generation.raw(key, None)) is not None and value not in neutral
    )
    if ignored:
        warnings.warn(f"generation_config settings that are not followed yet: {', '.join(ignored)}", stacklevel=2)
    if not generation.flag("do_sample", False):
        return GenerationSettings(eos_ids=_union(eos, more))
    return GenerationSettings(temperature, top_k, top_p, _union(eos, more))


def _union(*ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({token for group in ids for token in group}))


def settings_file(settings: GenerationSettings) -> bytes:
    """A ``generation_config.json`` that says the same."""
    values: dict[str, Any] = {"do_sample": settings.temperature > 0}
    if settings.temperature > 0:
        values |= {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    if settings.eos_ids:
        values["eos_token_id"] = list(settings.eos_ids)
    return json.dumps(values, indent=2).encode() + b"\n"
