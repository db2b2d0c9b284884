"""Faults that somebody trying to break cutaway found, each kept from coming back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.checkpoints import save as save_module
from cutaway.errors import ConfigError, LimitExceeded, RequestError, ShardError, StorageError, TokenizerError
from cutaway.formats.files import atomic_write
from cutaway.formats.shards import ShardedSafetensors
from tests.checkpoints.test_gguf import write as write_gguf
from tests.reference import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tiny.config("llama"), tmp_path / "model")


def test_writing_replaces_no_device_and_keeps_links(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="not a regular file"), atomic_write(tmp_path / "pipe") as file:
        file.write(b"x")
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_save_cut_short_is_no_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the old one nor the new one nor a mixture without a word."""
    model = cutaway.load(folder)

    marked = save_module.save_sharded

    def stop(*arguments: Any, **options: Any) -> None:
        marked(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(save_module, "save_sharded", stop)
    with pytest.raises(KeyboardInterrupt):
        cutaway.save(model, folder)
    with pytest.raises(ShardError, match="did not finish"):
        cutaway.load(folder)
    monkeypatch.undo()
    cutaway.save(model, folder)
    assert torch.equal(cutaway.load(folder).logits([1, 2]), model.logits([1, 2]))


def test_saving_takes_away_what_another_model_left(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "chat_template.jinja").write_text("{{ messages }}")
    (other / "tokenizer_config.json").write_text("{}")
    cutaway.save(cutaway.load(folder), other)
    assert not (other / "chat_template.jinja").exists()
    assert not (other / "tokenizer_config.json").exists()


@pytest.mark.real
def test_a_gguf_saved_as_a_folder_keeps_its_tokenizer(smollm2_path: Path, tmp_path: Path) -> None:
    model = cutaway.load(smollm2_path)
    cutaway.save(model, tmp_path / "saved")
    again = cutaway.load(tmp_path / "saved")
    assert again.settings == model.settings
    messages = [{"role": "user", "content": "Hello 🙂 <|im_end|> 123"}]
    assert again.tokenizer is not None
    assert model.tokenizer is not None
    assert again.tokenizer.chat(messages) == model.tokenizer.chat(messages)
    for text in ("Hello  world\n\n12345 don't", " Việt 東京", "<|im_start|>"):
        assert again.tokenizer.encode(text) == model.tokenizer.encode(text)
        assert again.tokenizer.encode(text, special=True) == model.tokenizer.encode(text, special=True)


def test_as_many_answers_as_fit(folder: Path) -> None:
    model = cutaway.load(folder)
    with pytest.raises(RequestError, match="n: "):
        model.generate([1, 2], n=10**7)


@pytest.mark.parametrize("device", ["zork", "cuda:99", "meta", 5.5])
def test_devices(folder: Path, device: Any) -> None:
    with pytest.raises(RequestError, match="device"):
        cutaway.load(folder, device=device)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "int4"])
def test_dtypes(folder: Path, dtype: Any) -> None:
    with pytest.raises(RequestError, match="dtype"):
        cutaway.load(folder, dtype=dtype)


def test_shard_with_an_endless_name(folder: Path) -> None:
    weights = json.dumps({"metadata": {}, "weight_map": {"a": "x" * 5000}})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(weights)
    with pytest.raises(ShardError):
        ShardedSafetensors(folder)


def test_settings_behind_a_link_to_nowhere(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").symlink_to("nowhere")
    with pytest.raises(StorageError):
        cutaway.load(folder)


def test_ignoring_an_end_token_outside_the_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 50256}))
    with pytest.raises(ConfigError) as caught:
        cutaway.load(folder)
    assert "ignore" in (caught.value.hint or "")
    (folder / "generation_config.json").unlink(missing_ok=True)
    cutaway.load(folder, ignore=("eos_token_id",))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon"),
        ({"rope.scaling.factor": ("f32", 2.0)}, "llama.rope.scaling.factor"),
        ({"rope.scaling.attn_factor": ("f32", 2.0)}, "llama.rope.scaling.attn_factor"),
        ({"block_count": ("arr", [2, 2])}, None),
    ],
)
def test_gguf_settings_that_change_numbers(tmp_path: Path, changes: dict[str, Any], field: str | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", changes)
    with pytest.raises((ConfigError, LimitExceeded)) as caught:
        cutaway.load(path)
    assert field is None or caught.value.field == field


def test_gguf_list_where_a_number_would_do(tmp_path: Path) -> None:
    """One entry a layer, all of them right."""
    cutaway.load(write_gguf(tmp_path / "m.gguf", {"rope.dimension_count": ("arr", [4, 4])}))


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [LONGER] * 4}},
        {"decoder": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10**6}},
        {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    ],
)
def test_tokenizers_that_blow_up(tmp_path: Path, part: dict[str, Any]) -> None:
    from cutaway.tokenizers import from_folder

    tree = {"version": "1.0", "model": WORDS, "added_tokens": [], **part}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(TokenizerError):
        from_folder(tmp_path)


def test_trace_ends_where_the_text_does(folder: Path) -> None:
    model = cutaway.load(folder)
    free = model.generate([1, 2, 3], max_tokens=8, temperature=0).tokens
    model.settings = type(model.settings)(eos_ids=(free[2],))
    ended = model.trace([1, 2, 3], "decoder.norm.out", max_tokens=8)
    wanted = 3 + free.index(free[2]) + 1
    assert len(ended.tokens[0]) == wanted
    assert ended["decoder.norm.out"].shape[1] == wanted


def test_hints_show_where_an_error_ends_a_program() -> None:
    import cutaway.errors as errors

    assert RequestError("no", hint="do this").__notes__ == ["do this"]
    assert errors.__doc__


def test_arguments_of_no_use_are_typed_errors(tmp_path: Path) -> None:
    """Found by a reader who had no part in it: raw TypeErrors, and words that were taken in silence."""
    words = {"d_model": 32, "n_heads": 4, "layers": 1, "vocab_size": 16}
    model = cutaway.build(words)
    for call in (
        lambda: cutaway.save(model, None),  # type: ignore[arg-type]
        lambda: cutaway.save(3, tmp_path / "p"),  # type: ignore[arg-type]
        lambda: cutaway.build(None),  # type: ignore[arg-type]
        lambda: cutaway.build([1]),  # type: ignore[arg-type]
        lambda: cutaway.build(words, seed="x"),  # type: ignore[arg-type]
        lambda: cutaway.build(words, seed=1.5),  # type: ignore[arg-type]
        lambda: cutaway.load(tmp_path, ignore="x"),
        lambda: model.trace([1, 2], "logits", edits="x"),  # type: ignore[arg-type]
        lambda: model.trace([1, 2], "logits", edits={"logits": None}),  # type: ignore[dict-item]
        lambda: model.trace([1, 2], 3),  # type: ignore[arg-type]
        lambda: model.trace([1, 2], ["logits"]),  # type: ignore[arg-type]
        lambda: model.logits([1], target=[1]),
    ):
        with pytest.raises(cutaway.errors.RequestError):
            call()


def test_a_long_trace_reserves_nothing_for_what_may_never_come() -> None:
    model = cutaway.build({"d_model": 32, "n_heads": 4, "layers": 1, "vocab_size": 16})
    kept = model.trace([1, 2], "logits", max_tokens=300)
    assert kept["logits"].shape == (1, 302, 16)


def test_a_key_to_ignore_that_is_not_there_is_said(tmp_path: Path) -> None:
    model = cutaway.build({"d_model": 32, "n_heads": 4, "layers": 1, "vocab_size": 16})
    cutaway.save(model, tmp_path, format="cutaway")
    with pytest.warns(UserWarning, match="no key 'modeltype' to ignore; did you mean 'model_type'"):
        cutaway.load(tmp_path, ignore=("modeltype",))
