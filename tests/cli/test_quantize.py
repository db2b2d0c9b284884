"""``cutaway quantize``."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
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
    quiet = call("quantize", folder, "-o", tmp_path / "m.gguf", "--no-perplexity", "-q", "--replace")
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


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_a_mixture(kind: str, call: Call, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Its experts become blocks, with the bytes of the format's own package; perplexity is measured on these."""
    source = write_folder(tmp_path / "m", {**tiny.config("mixtral"), **config(model_type="mixtral")})
    out = tmp_path / "m.gguf"
    done = call("quantize", source, "-o", out, "-t", kind, "--json")
    assert done.code == 0
    assert done.json["fallbacks"] == []
    assert done.json["types"][kind.upper()]["tensors"] == 2 + 3 * (4 + 3)
    assert done.json["perplexity"]["moved"] > 0
    own = cutaway.load(source).transformer.state_dict()
    found = {str(tensor.name): tensor for tensor in gguf.GGUFReader(out).tensors}
    for i in range(3):
        for part in ("gate", "up", "down"):
            numbers = own[f"decoder.layers.{i}.branches.moe.body.{part}"].numpy()
            wanted = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind.upper()])
            assert np.array_equal(found[f"blk.{i}.ffn_{part}_exps.weight"].data, wanted)
    assert call("show", out, "--json").json["types"][kind.upper()]["tensors"] == 2 + 3 * 7
    assert not [str(one.message) for one in recwarn if "stay" in str(one.message)]


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


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_model_that_is_read_is_not_written_over(call: Call, folder: Path, tmp_path: Path) -> None:
    """By whichever name it is meant: its file, its folder, a link, a folder around it."""
    mine = copied(folder, tmp_path / "around" / "mine")
    (tmp_path / "around" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(mine)
    (tmp_path / "link.gguf").symlink_to(mine / "model.safetensors")
    (tmp_path / "hard.gguf").hardlink_to(mine / "model.safetensors")
    before = contents(tmp_path / "around")
    weights = mine / "model.safetensors"
    for source in (mine, weights, tmp_path / "link", tmp_path / "link" / "model.safetensors"):
        for out in ("around/mine", "link", "link/.", "around/mine/../mine", "around", "link.gguf", "hard.gguf"):
            for also in ([], ["--replace"]):
                done = call("quantize", source, "-o", tmp_path / out, "-t", "q4_0", *also)
                assert (done.code, "would replace" in done.err) == (2, True), (source, out, done.err)
                assert contents(tmp_path / "around") == before
    inner = call("quantize", weights, "-o", mine / "q4", "-t", "q4_0", "--json")
    assert inner.code == 0
    assert inner.json["bytes"]["before"] == weights.stat().st_size > inner.json["bytes"]["after"]


def test_another_model_stays_unless_it_may_go(call: Call, folder: Path, tmp_path: Path) -> None:
    other, file = copied(folder, tmp_path / "other"), tmp_path / "m.gguf"
    file.write_bytes(b"GGUF and something")
    before = contents(tmp_path)
    for out in (other, file):
        done = call("quantize", folder, "-o", out, "-t", "q4_0", "--no-perplexity")
        assert (done.code, "--replace" in done.err) == (2, True)
    assert contents(tmp_path) == before
    for out in (other, file):
        assert call("quantize", folder, "-o", out, "-t", "q4_0", "--no-perplexity", "--replace").code == 0
        assert cutaway.load(out).spec.d_model == cutaway.load(folder).spec.d_model


def test_said_before_anything_is_read(
    call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that are none, places that cannot be written to, families without a form: no text is read first."""
    monkeypatch.setattr(perplexity, "expected", None)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "d.gguf").mkdir()
    rows = [(2, "-"), (2, tmp_path / "m.gguf.txt"), (2, tmp_path / "m.txt"), (4, tmp_path / "file" / "m.gguf")]
    rows += [(4, tmp_path / "file" / "m"), (4, tmp_path / "none" / "m.gguf"), (4, tmp_path / "d.gguf")]
    rows += [(4, tmp_path / "file")]
    for code, out in rows:
        done = call("quantize", folder, "-o", out, "-t", "q4_0")
        assert done.code == code, (out, done.err)
    values = {**tiny.config("granite"), "vocab_size": config()["vocab_size"], "eos_token_id": 0, "bos_token_id": 0}
    source = write_folder(tmp_path / "granite", values)
    assert "no form in GGUF" in call("quantize", source, "-o", tmp_path / "m.gguf").err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "home") == ["d.gguf", "file", "granite"]


def test_a_full_disk(call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is said before the first byte, and leaves no folder behind."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for out in ("m", "m.gguf"):
        done = call("quantize", folder, "-o", tmp_path / out, "-t", "q4_0", "--no-perplexity")
        assert (done.code, "too full" in done.err) == (4, True)
        assert not (tmp_path / out).exists()


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
