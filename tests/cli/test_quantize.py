"""``cutaway quantize``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.cli import perplexity
from cutaway.formats.gguf import GgufFile
from tests.cli.conftest import config, write_folder
from tests.reference import tiny

Call = Callable[..., Any]


def test_a_smaller_file(call: Call, folder: Path, tmp_path: Path) -> None:
    """The file that save makes; sizes, errors and perplexities that are so."""
    out = tmp_path / "m.gguf"
    done = call("quantize", folder, "-o", out, "-t", "Q8_0", "--json")
    assert done.code == 0
    model = cutaway.load(folder)
    cutaway.save(model, tmp_path / "own.gguf", format="gguf", quantize="q8_0")
    assert out.read_bytes() == (tmp_path / "own.gguf").read_bytes()
    value = done.json
    assert (value["type"], value["out"], value["fallbacks"]) == ("Q8_0", str(out), [])
    assert value["bytes"] == {"before": (folder / "model.safetensors").stat().st_size, "after": out.stat().st_size}
    found = value["types"]["Q8_0"]
    with GgufFile(out) as file:
        sizes = [info.nbytes for info in file.tensors.values() if info.type.name == "Q8_0"]
    assert (found["tensors"], found["nbytes"]) == (len(sizes), sum(sizes))
    assert 0 < found["mean_error"] < found["largest_error"]
    assert 0 < found["relative_error"] < 0.01
    said = value["perplexity"]
    for name, path in (("before", folder), ("after", out)):
        one = cutaway.load(path)
        assert one.tokenizer is not None
        ids = one.tokenizer.encode(perplexity.text_of(None))
        width = min(perplexity.WINDOW, one.spec.max_positions)
        odds: list[float] = []
        for start in range(0, len(ids), width):
            window = ids[start : start + width]
            logs = one.logits(window)[0].log_softmax(-1)  # type: ignore[index]
            odds += [float(logs[i, token]) for i, token in enumerate(window[1:])]
        assert said["tokens"] == len(odds)
        assert said[name] == pytest.approx(math.exp(-sum(odds) / len(odds)), rel=1e-4)
    assert said["moved"] > 0


def test_what_is_said(call: Call, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text("The cat sat on the mat. " * 20)
    done = call("quantize", folder, "-o", tmp_path / "m.gguf", "--text", tmp_path / "page.txt")
    assert done.code == 0
    assert "Q4_K_M" in done.out
    assert "not whole blocks of Q4_K: Q5_0" in done.out
    assert "perplexity" in done.out
    assert max(map(len, done.out.splitlines()[1:])) <= 80
    quiet = call("quantize", folder, "-o", tmp_path / "m.gguf", "--no-perplexity", "-q")
    assert "perplexity" not in quiet.out
    assert quiet.err == ""


def test_our_own_format(call: Call, tmp_path: Path) -> None:
    """A family without a form in GGUF: refused there with what to do, and a folder holds it."""
    values = {**tiny.config("granite"), "vocab_size": config()["vocab_size"], "eos_token_id": 0, "bos_token_id": 0}
    source = write_folder(tmp_path / "granite", values)
    refused = call("quantize", source, "-o", tmp_path / "m.gguf", "-t", "q5_1", "--json")
    assert (refused.code, refused.error["code"]) == (3, "unsupported")
    assert "folder" in refused.error["hint"]
    assert not (tmp_path / "m.gguf").exists()
    done = call("quantize", source, "-o", tmp_path / "m", "-t", "q5_1", "--json")
    assert done.code == 0
    assert done.json["types"]["Q5_1"]["tensors"] > 0
    assert (
        call("show", tmp_path / "m", "--json").json["types"]["Q5_1"]["tensors"] == done.json["types"]["Q5_1"]["tensors"]
    )
    assert call("run", "-m", tmp_path / "m", "the", "-n", "3").code == 0
    again = call("quantize", tmp_path / "m", "-o", tmp_path / "m2", "-t", "q4_0")
    assert "already" in again.err


def test_models_without_a_perplexity(call: Call, tmp_path: Path) -> None:
    cutaway.save(cutaway.Model(tiny.transformer("llama")), tmp_path / "bare", format="cutaway")
    done = call("quantize", tmp_path / "bare", "-o", tmp_path / "m.gguf", "-t", "q8_0", "--json")
    assert done.code == 0
    assert "perplexity" not in done.json
    assert "no perplexity" in done.err


def test_refused(call: Call, folder: Path, gguf_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(" ")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    rows: list[tuple[int, list[object]]] = [
        (2, [folder]),
        (2, [folder, "-o", tmp_path / "m.gguf", "-t", "q2_k"]),
        (2, [folder, "-o", tmp_path / "m.safetensors"]),
        (2, [gguf_file, "-o", gguf_file]),
        (2, [folder, "-o", folder]),
        (2, [folder, "-o", other]),
        (3, [folder, "-o", tmp_path / "m.gguf", "--text", page]),
        (4, [folder, "-o", tmp_path / "m.gguf", "--text", tmp_path / "none.txt"]),
        (3, [tmp_path / "nothing", "-o", tmp_path / "m.gguf"]),
    ]
    before = gguf_file.read_bytes()
    for code, words in rows:
        done = call("quantize", *words)
        assert done.code == code, (words, done.err)
    assert gguf_file.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} <= {"page.txt", "other", "home"}
    assert "q4_k" in call("quantize", folder, "-o", tmp_path / "m.gguf", "-t", "q4_k_l").err


def test_a_long_text_is_read_in_windows(folder: Path) -> None:
    """Each window begins anew; its first token is not counted."""
    model = cutaway.load(folder)
    told: list[tuple[int, int]] = []
    found = perplexity.expected(model, "a" * 150, lambda done, total: told.append((done, total)))
    assert model.spec.max_positions == 64
    assert len(found.logprobs) == 150 - 3
    assert told == [(64, 150), (128, 150), (150, 150)]
    one = model.score([model.tokenizer.encode("a")[0]] * 64).logprobs[1:]  # type: ignore[union-attr]
    assert found.logprobs[:63] == one
    assert torch.tensor(found.logprobs[63:126]).equal(torch.tensor(one))
