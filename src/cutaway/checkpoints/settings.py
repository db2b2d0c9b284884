"""What ``generation_config.json`` says, as defaults for generating.

Where there is no such file, the same keys are looked for in ``config.json``, as transformers does. Where there is one,
it alone counts, but for end tokens (all that either names) and for a start token that it leaves out.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from cutaway.formats.config import ConfigReader
from cutaway.spec import GenerationSettings

# Settings that change what is generated and are not followed here: key → the value that changes nothing.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1.0, None),
    "encoder_no_repeat_ngram_size": (0, None),
    "num_beam_groups": (1, None),
    "typical_p": (1.0, None),
    "top_h": (None,),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "diversity_penalty": (0.0, None),
    "penalty_alpha": (0.0, None),
    "force_words_ids": ([], None),
    "exponential_decay_length_penalty": (None,),
    "stop_strings": ([], None),
    "token_healing": (False, None),
    "watermarking_config": (None,),
    "guidance_scale": (1.0, None),
    "sequence_bias": ({}, [], None),
    "forced_decoder_ids": ([], None),
    "constraints": ([], None),
    "max_time": (None,),
}
_LONGEST = 1 << 40
_MOST_BEAMS = 1024

# Our field → their key, where nothing but the name differs.
_KEYS = {
    "repetition_penalty": "repetition_penalty",
    "num_beams": "num_beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "renormalize": "renormalize_logits",
    "min_length": "min_length",
    "min_new_tokens": "min_new_tokens",
    "max_length": "max_length",
    "max_new_tokens": "max_new_tokens",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words_ids": "bad_words_ids",
    "suppress_ids": "suppress_tokens",
    "begin_suppress_ids": "begin_suppress_tokens",
    "forced_bos_id": "forced_bos_token_id",
    "forced_eos_ids": "forced_eos_token_id",
    "decoder_start_id": "decoder_start_token_id",
    "pad_id": "pad_token_id",
}


def token_ids(c: ConfigReader, key: str, vocab_size: int) -> tuple[int, ...]:
    """A token id, a list of them, or nothing, each checked against the vocabulary."""
    value = None if c.ignores(key) else c.raw(key, None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        _check_id(c, key, key, token, vocab_size)
    return tuple(ids)


def _check_id(c: ConfigReader, key: str, at: str, token: object, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        error = c.error(at, "not a token of this vocabulary", expected=f"0…{vocab_size - 1}", got=token)
        error.hint = f"Correct it, or leave it unread: load with ignore=({key!r},)."
        raise error


def _one_id(c: ConfigReader, key: str, vocab_size: int) -> int | None:
    if c.raw(key, None) == -1 and key == "pad_token_id":
        return None
    ids = token_ids(c, key, vocab_size)
    if len(ids) > 1:
        raise c.error(key, "more than one token", expected="a token id", got=list(ids))
    return ids[0] if ids else None


def _sequences(c: ConfigReader, key: str, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """A list of lists of ids, or nothing."""
    value = None if c.ignores(key) else c.raw(key, None)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise c.error(key, "not a list", expected="a list of lists of token ids", got=value)
    for i, ids in enumerate(value):
        if not isinstance(ids, list) or not ids:
            raise c.error(f"{key}/{i}", "not a list of tokens", expected="at least one token id", got=ids)
        for j, token in enumerate(ids):
            _check_id(c, key, f"{key}/{i}/{j}", token, vocab_size)
    return tuple(tuple(ids) for ids in value)


def _early(c: ConfigReader) -> bool | str:
    value = c.raw("early_stopping", None)
    if value is not None and not isinstance(value, bool) and value != "never":
        raise c.error("early_stopping", "unknown value", expected='true, false or "never"', got=value)
    return value or False


def read_settings(config: ConfigReader, generation: ConfigReader | None, vocab_size: int) -> GenerationSettings:
    """Defaults of a checkpoint. What ends an answer is the union of what both files name.

    Raises:
        ConfigError: a token outside the vocabulary, or a value out of range.
    """
    eos = token_ids(config, "eos_token_id", vocab_size)
    for key in ("bos_token_id", "pad_token_id"):
        if config.raw(key, None) != -1:  # some configs say −1 for "none"
            token_ids(config, key, vocab_size)
    more = () if generation is None else token_ids(generation, "eos_token_id", vocab_size)
    if more and not set(eos) <= set(more):
        warnings.warn(
            f"config and generation_config name different end tokens ({list(eos)}, {list(more)}); all end an answer",
            stacklevel=2,
        )
    if generation is not None:
        for key in ("bos_token_id", "pad_token_id"):
            token_ids(generation, key, vocab_size)
    c = config if generation is None else generation
    pairs = config.raw("is_encoder_decoder", False) is True
    draws = c.flag("do_sample", False)
    heat = {
        "temperature": c.number("temperature", 1.0, low=0),
        "top_k": c.integer("top_k", 50, low=0, high=_LONGEST),
        "top_p": c.number("top_p", 1.0, low=0, high=1),
        "min_p": c.number("min_p", 0.0, low=0, high=1),
    }
    start = _one_id(c, "decoder_start_token_id", vocab_size)
    if start is None:  # the token that training shifted in; transformers goes on to BOS at once
        start = _one_id(config, "decoder_start_token_id", vocab_size)
    if start is None and pairs:
        start = next(iter(token_ids(c, "bos_token_id", vocab_size)), None)
    settings = GenerationSettings(
        **(heat if draws else {}),
        eos_ids=tuple(sorted({*eos, *more})),
        repetition_penalty=c.number("repetition_penalty", 1.0, low=1e-6),
        num_beams=c.integer("num_beams", 1, high=_MOST_BEAMS),
        length_penalty=c.number("length_penalty", 1.0, low=-50, high=50),
        early_stopping=_early(c),
        renormalize=c.flag("renormalize_logits", False),
        min_length=c.integer("min_length", 0, low=0, high=_LONGEST),
        min_new_tokens=c.integer("min_new_tokens", 0, low=0, high=_LONGEST),
        # A decoder's max_length counts the prompt, so it says nothing of the answer.
        max_length=c.integer("max_length", None, high=_LONGEST) if pairs else None,
        max_new_tokens=c.integer("max_new_tokens", None, high=_LONGEST),
        no_repeat_ngram_size=c.integer("no_repeat_ngram_size", 0, low=0, high=_LONGEST),
        bad_words_ids=_sequences(c, "bad_words_ids", vocab_size),
        suppress_ids=token_ids(c, "suppress_tokens", vocab_size),
        begin_suppress_ids=token_ids(c, "begin_suppress_tokens", vocab_size),
        forced_bos_id=_one_id(c, "forced_bos_token_id", vocab_size),
        forced_eos_ids=token_ids(c, "forced_eos_token_id", vocab_size),
        decoder_start_id=start,
        pad_id=_one_id(c, "pad_token_id", vocab_size),
    )
    _warn(c, draws and settings.num_beams > 1)
    return settings


def _warn(c: ConfigReader, drawn_beams: bool) -> None:
    """Name what the checkpoint wants and does not get."""
    ignored = [
        key
        for key, neutral in _NOT_FOLLOWED.items()
        if (value := c.raw(key, None)) is not None and value not in neutral
    ]
    if drawn_beams:
        ignored.append("do_sample (with num_beams)")
    if ignored:
        said = ", ".join(sorted(ignored))
        warnings.warn(f"generation_config settings that are not followed yet: {said}", stacklevel=3)


def settings_file(settings: GenerationSettings) -> bytes:
    """A ``generation_config.json`` that says the same."""
    values: dict[str, Any] = {"do_sample": settings.temperature > 0}
    if settings.temperature > 0:
        values |= {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
        if settings.min_p:
            values["min_p"] = settings.min_p
    if settings.eos_ids:
        values["eos_token_id"] = list(settings.eos_ids)
    usual = GenerationSettings()
    for field, key in _KEYS.items():
        if (value := getattr(settings, field)) != getattr(usual, field):
            values[key] = list(value) if isinstance(value, tuple) else value
    return json.dumps(values, indent=2).encode() + b"\n"
