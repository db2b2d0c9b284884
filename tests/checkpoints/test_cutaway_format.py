"""Our own format: any model, exactly back; and a folder of it that a stranger wrote."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.reference import tiny
from tests.spec.random_specs import random_spec
from tests.tokenizers import small

import cutaway
from cutaway.errors import (
    ConfigError,
    CutawayError,
    LimitExceeded,
    RequestError,
    ShapeMismatch,
    ShardError,
    StorageError,
)
from cutaway.model import Model
from cutaway.models.init import built


def same(one: Model, two: Model) -> bool:
    a, b = one.transformer.state_dict(), two.transformer.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("seed", range(25))
def test_random_models(seed: int, tmp_path: Path) -> None:
    model = Model(built(random_spec(seed), seed))
    cutaway.save(model, tmp_path, format="cutaway")
    again = cutaway.load(tmp_path)
    assert again.spec == model.spec
    assert same(model, again)
    ids = [i % model.spec.vocab_size for i in range(9)]
    assert torch.equal(model.logits(ids), again.logits(ids))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_family_and_back_to_hugging_face(name: str, tmp_path: Path) -> None:
    """A model of a family stays one: saved as that again, its folder is the same."""
    model = Model(tiny.transformer(name))
    cutaway.save(model, tmp_path / "hf")
    loaded = cutaway.load(tmp_path / "hf")
    cutaway.save(loaded, tmp_path / "own", format="cutaway")
    again = cutaway.load(tmp_path / "own")
    assert same(model, again)
    assert replace(again.spec, kept=()) == replace(loaded.spec, kept=())
    cutaway.save(again, tmp_path / "back")
    configs = [json.loads((tmp_path / place / "config.json").read_text()) for place in ("hf", "back")]
    assert configs[0] == configs[1]
    tensors = [load_file(tmp_path / place / "model.safetensors") for place in ("hf", "back")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    model = cutaway.build({"d_model": 16, "n_heads": 2, "layers": 2, "vocab_size": 32})
    cutaway.save(model, tmp_path, format="cutaway")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.keys() == {"model_type", "format", "dtype", "spec", "kept"}
    assert (config["model_type"], config["format"], config["dtype"]) == ("cutaway", 1, "float32")
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.transformer.state_dict())


def test_tokenizer_and_ends_travel(tmp_path: Path) -> None:
    values = {**tiny.config("llama"), "vocab_size": 600, "eos_token_id": [0, 2]}
    from cutaway.checkpoints.save import save_folder

    save_folder(tiny.transformer(values), tmp_path / "a")
    small.folder(tmp_path / "a", tokenizer_config={"eos_token": "<|im_end|>", "chat_template": small.CHATML})
    model = cutaway.load(tmp_path / "a")
    cutaway.save(model, tmp_path / "b", format="cutaway")
    again = cutaway.load(tmp_path / "b")
    assert again.settings == model.settings
    assert again.settings.eos_ids == (0, 2)
    assert again.tokenizer is not None
    assert again.tokenizer.encode("the cat") == model.tokenizer.encode("the cat")  # type: ignore[union-attr]
    assert again.encode_prompt([{"role": "user", "content": "hi"}])


def test_over_itself_and_in_half_precision(tmp_path: Path) -> None:
    model = cutaway.build({"d_model": 16, "n_heads": 2, "layers": 2, "vocab_size": 32})
    model.transformer.bfloat16()
    cutaway.save(model, tmp_path, format="cutaway")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = cutaway.load(tmp_path, dtype="bf16", mmap=True)
    assert same(model, again)
    assert again.spec == model.spec
    cutaway.save(again, tmp_path, format="cutaway")
    assert same(again, cutaway.load(tmp_path, dtype="bf16"))


def test_one_format_has_no_words_for_the_other(tmp_path: Path) -> None:
    model = cutaway.build({"d_model": 16, "n_heads": 2, "layers": 2, "vocab_size": 32})
    with pytest.raises(RequestError, match="no Hugging Face family") as caught:
        cutaway.save(model, tmp_path / "m")
    assert "cutaway" in (caught.value.hint or "")
    posing = Model(built(replace(model.spec, family="gpt2")))
    with pytest.raises(ConfigError, match="is no gpt2 model"):
        cutaway.save(posing, tmp_path / "m")
    sly = tiny.transformer("llama")
    block = sly.spec.decoder.layers[0]
    capped = replace(block.branches[0], body=replace(block.branches[0].body, soft_cap=5.0))  # type: ignore[type-var]
    layers = (replace(block, branches=(capped, *block.branches[1:])),) * 3
    sly.spec = replace(sly.spec, decoder=replace(sly.spec.decoder, layers=layers))
    with pytest.raises(ConfigError) as bad:
        cutaway.save(Model(sly), tmp_path / "m")
    assert bad.value.field == "/decoder/layers/0/branches/0/body/soft_cap"
    for unknown in ("onnx", "", None):
        with pytest.raises(RequestError):
            cutaway.save(model, tmp_path / "m", format=unknown)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        cutaway.save(model, tmp_path / "m", format="cutaway", dtype="fp16")
    assert not (tmp_path / "m").exists()


# ---- hostile ------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]
BAD: dict[str, tuple[type[CutawayError], str, Change]] = {
    "no spec": (ConfigError, "/spec", lambda c: c.pop("spec")),
    "spec a list": (ConfigError, "/spec", lambda c: c.update(spec=[])),
    "no format": (ConfigError, "/format", lambda c: c.pop("format")),
    "another format": (ConfigError, "/format", lambda c: c.update(format=2)),
    "unknown key": (ConfigError, "/colour", lambda c: c.update(colour=1)),
    "kept no list": (ConfigError, "/kept", lambda c: c.update(kept="x")),
    "kept of a number": (ConfigError, "/kept", lambda c: c.update(kept=[3])),
    "kept hides the spec": (ConfigError, "/kept", lambda c: c.update(kept=["spec"])),
    "another family": (ConfigError, "/spec/family", lambda c: c["spec"].update(family="../../etc")),
    "field inside": (ConfigError, "/spec/head/colour", lambda c: c["spec"]["head"].update(colour=1)),
    "width too large": (ConfigError, "/spec/d_model", lambda c: c["spec"].update(d_model=1 << 30)),
    "rows too many": (LimitExceeded, "/spec/vocab_size", lambda c: c["spec"].update(vocab_size=1 << 40)),
    "layers too many": (
        LimitExceeded,
        "/spec/decoder/layers",
        lambda c: c["spec"]["decoder"].update(layers=[0] * 100_000),
    ),
    "dtype unknown": (ConfigError, "/dtype", lambda c: c.update(dtype="int4")),
    "eos past the end": (ConfigError, "/eos_token_id", lambda c: c.update(eos_token_id=32)),
    "more layers than tensors": (
        ShapeMismatch,
        "decoder.layers.2.branches.attn.pre_norm.weight",
        lambda c: c["spec"]["decoder"].update(layers=[0] * 4096),
    ),
    "wider than the tensors": (ShapeMismatch, "embed.tokens", lambda c: c["spec"].update(d_model=32)),
    "longer table": (ShapeMismatch, "embed.tokens", lambda c: c["spec"].update(vocab_size=1 << 24)),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    model = cutaway.build({"d_model": 16, "n_heads": 2, "layers": 2, "vocab_size": 32})
    cutaway.save(model, folder, format="cutaway")
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("case", BAD)
def test_hostile(case: str, good: Path, tmp_path: Path) -> None:
    error, field, change = BAD[case]
    shutil.copytree(good, tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(error) as caught:
        cutaway.load(tmp_path / "m")
    assert caught.value.field == field
    assert caught.value.path is not None


def test_every_prefix_of_the_config(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "m")
    whole = (good / "config.json").read_bytes()
    for n in range(0, len(whole) - 2, 13):
        (tmp_path / "m" / "config.json").write_bytes(whole[:n])
        with pytest.raises(CutawayError):
            cutaway.load(tmp_path / "m")


# ---- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["replace", "fsync", "chmod"])
def test_a_disk_that_refuses(call: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each call in turn: what was there loads as before, and nothing is left lying about."""
    shutil.copytree(good, tmp_path / "m")
    old = cutaway.load(tmp_path / "m")
    new = Model(built(old.spec, seed=5))
    real, left = getattr(os, call), 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)

    failures = 0
    for n in range(1, 12):
        left = n
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                cutaway.save(new, tmp_path / "m", format="cutaway")
            except StorageError:
                failures += 1
        left = 0
        with contextlib.suppress(ShardError):  # a folder that says that its save did not finish
            there = cutaway.load(tmp_path / "m")
            assert same(there, old) or same(there, new)
        assert not [path for path in (tmp_path / "m").iterdir() if path.suffix == ".tmp"]
        cutaway.save(old, tmp_path / "m", format="cutaway")
        assert same(cutaway.load(tmp_path / "m"), old)
    assert failures >= 2


def test_a_bit_that_fell_over_on_the_way(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check compares what the disk gives back, unless it is told not to."""
    import safetensors.torch

    shutil.copytree(good, tmp_path / "m")
    old, real = cutaway.load(tmp_path / "m"), safetensors.torch.save_file

    def damaging(tensors: Any, name: Any, **options: Any) -> None:
        real(tensors, name, **options)
        with open(name, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", damaging)
        with pytest.raises(StorageError, match="reads back differently"):
            cutaway.save(old, tmp_path / "m", format="cutaway")
        assert same(cutaway.load(tmp_path / "m"), old)
        cutaway.save(old, tmp_path / "m", format="cutaway", verify=False)
    assert not same(cutaway.load(tmp_path / "m"), old)
