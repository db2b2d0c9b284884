"""What a checkpoint says about generating: read, checked, written back, and as transformers takes it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from cutaway.checkpoints.settings import read_settings, settings_file
from cutaway.errors import ConfigError
from cutaway.formats.config import ConfigReader
from cutaway.spec import GenerationSettings

VOCAB = 64
BART: dict[str, Any] = {"model_type": "bart", "is_encoder_decoder": True, "eos_token_id": 2}
EVERY: dict[str, Any] = {
    "do_sample": False,
    "repetition_penalty": 1.2,
    "num_beams": 4,
    "length_penalty": 2.0,
    "early_stopping": "never",
    "renormalize_logits": True,
    "min_length": 5,
    "min_new_tokens": 3,
    "max_length": 40,
    "max_new_tokens": 30,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[1, 2], [3]],
    "suppress_tokens": [4, 5],
    "begin_suppress_tokens": [6],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": [2, 8],
    "decoder_start_token_id": 9,
    "pad_token_id": 10,
    "eos_token_id": [2, 11],
    "num_return_sequences": 2,
}
READ = GenerationSettings(
    eos_ids=(2, 11), repetition_penalty=1.2, num_beams=4, length_penalty=2.0, early_stopping="never", renormalize=True,
    min_length=5, min_new_tokens=3, max_length=40, max_new_tokens=30, no_repeat_ngram_size=3,
    bad_words_ids=((1, 2), (3,)), suppress_ids=(4, 5), begin_suppress_ids=(6,), forced_bos_id=7, forced_eos_ids=(2, 8),
    decoder_start_id=9, pad_id=10,
)  # fmt: skip


def read(config: dict[str, Any], generation: dict[str, Any] | None = None) -> GenerationSettings:
    beside = None if generation is None else ConfigReader(generation, path="generation_config.json")
    return read_settings(ConfigReader(config, path="config.json"), beside, VOCAB)


def test_every_setting() -> None:
    assert read(BART, EVERY) == READ


def test_the_old_place() -> None:
    """Without a generation_config.json, config.json says the same; beside one it says nothing."""
    assert read({**BART, **EVERY}) == READ
    assert read({**BART, **EVERY, "eos_token_id": 2}, {}) == GenerationSettings(eos_ids=(2,), decoder_start_id=9)


def test_nothing_said() -> None:
    assert read({}) == read({}, {}) == GenerationSettings()
    assert read({}, dict.fromkeys(EVERY)) == GenerationSettings()
    assert read({"pad_token_id": -1, "bos_token_id": -1}) == GenerationSettings()


def test_where_an_encoder_decoder_starts() -> None:
    """The generation config, else the config, else BOS; a decoder alone starts with its prompt."""
    assert read({**BART, "decoder_start_token_id": 3}, {"decoder_start_token_id": 4}).decoder_start_id == 4
    assert read({**BART, "decoder_start_token_id": 3}, {"bos_token_id": 4}).decoder_start_id == 3
    assert read(BART, {"bos_token_id": 4}).decoder_start_id == 4
    assert read({**BART, "bos_token_id": 5}).decoder_start_id == 5
    assert read({"bos_token_id": 5}, {"bos_token_id": 5}).decoder_start_id is None


def test_lengths_that_count_the_prompt_are_no_default() -> None:
    both = {"max_length": 20, "max_new_tokens": 7, "min_length": 5}
    assert read({}, both) == GenerationSettings(max_new_tokens=7, min_length=5)
    assert read(BART, both).max_length == 20


def test_temperatures_hold_where_it_draws() -> None:
    heat = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1}
    assert read({}, heat) == GenerationSettings()
    drawn = GenerationSettings(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1)
    assert read({}, {**heat, "do_sample": True}) == read({**heat, "do_sample": True}) == drawn


@pytest.mark.parametrize(
    "settings",
    [
        READ,
        GenerationSettings(),
        GenerationSettings(temperature=0.7, top_k=0, top_p=0.5, min_p=0.2, eos_ids=(1,), early_stopping=True),
        GenerationSettings(temperature=1.0, num_beams=1, forced_bos_id=0, pad_id=0, decoder_start_id=0),
    ],
)
def test_written_and_read_again(settings: GenerationSettings) -> None:
    for config in (BART, {**BART, "decoder_start_token_id": settings.decoder_start_id}):
        again = read({**config, "eos_token_id": None}, json.loads(settings_file(settings)))
        assert again == settings


@pytest.mark.parametrize(
    ("key", "value", "at"),
    [
        *[("repetition_penalty", value, "") for value in (0, -1, "1", True)],
        *[("num_beams", value, "") for value in (0, -1, 1.5, True, 5000)],
        *[("length_penalty", value, "") for value in ("1", True, 1e9)],
        *[("early_stopping", value, "") for value in (1, 0, "always", [])],
        *[("min_p", value, "") for value in (-0.1, 1.1, "0")],
        *[(key, value, "") for key in ("min_length", "min_new_tokens", "no_repeat_ngram_size") for value in (-1, 1.5)],
        *[(key, value, "") for key in ("max_length", "max_new_tokens") for value in (0, -1, 1.5, True)],
        *[("bad_words_ids", value, "") for value in (3, "a", {"a": 1})],
        *[("bad_words_ids", [[1], value], "/1") for value in ([], 3, None)],
        *[("bad_words_ids", [[1], [2, value]], "/1/1") for value in (64, -1, True, 1.5, [1])],
        *[
            (key, value, "")
            for key in ("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id")
            for value in (64, [1, -1], [True], "a")
        ],
        *[
            (key, value, "")
            for key in ("forced_bos_token_id", "decoder_start_token_id")
            for value in (64, -1, True, [1, 2], "a")
        ],
        ("renormalize_logits", 1, ""),
    ],
)
def test_values_that_make_no_sense(key: str, value: Any, at: str) -> None:
    for config, generation, path in ((BART, {key: value}, "generation_config.json"), ({**BART, key: value}, None, "")):
        with pytest.raises(ConfigError) as caught:
            read(config, generation)
        assert caught.value.field == f"/{key}{at}"
        assert path in str(caught.value.path)


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("encoder_no_repeat_ngram_size", 3, 0),
        ("encoder_repetition_penalty", 1.1, 1.0),
        ("num_beam_groups", 2, 1),
        ("diversity_penalty", 0.5, 0.0),
        ("exponential_decay_length_penalty", [5, 1.1], None),
        ("stop_strings", ["a"], []),
        ("sequence_bias", [[[1], 2.0]], None),
        ("guidance_scale", 2.0, 1),
    ],
)
def test_what_is_not_followed_is_named(key: str, value: Any, neutral: Any) -> None:
    for config, generation in ((BART, {key: value}), ({**BART, key: value}, None)):
        with pytest.warns(UserWarning, match=key):
            read(config, generation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(BART, {key: neutral})


def test_beams_that_are_drawn_are_not_followed() -> None:
    with pytest.warns(UserWarning, match="do_sample"):
        assert read({}, {"do_sample": True, "num_beams": 2}).num_beams == 2


def test_transformers_reads_the_same(tmp_path: Path) -> None:
    """Its own generation config of the same files says what ours does, in both places."""
    from transformers import GenerationConfig

    for name, values in (("generation_config.json", EVERY), ("config.json", {**BART, **EVERY})):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(json.dumps(values))
        theirs = GenerationConfig.from_pretrained(
            folder, config_file_name=name, _from_model_config=name == "config.json"
        )
        assert {key: getattr(theirs, key) for key in EVERY} == EVERY
    (tmp_path / "generation_config.json").write_bytes(settings_file(READ))
    again = GenerationConfig.from_pretrained(tmp_path)
    assert {key: getattr(again, key) for key in EVERY if key != "num_return_sequences"} == {
        key: value for key, value in EVERY.items() if key != "num_return_sequences"
    }
