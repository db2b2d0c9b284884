"""The scripts in examples/: each trains a small model, saves it, loads it, and is good at what it was trained for."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

import cutaway
from cutaway.cli.group import invoke

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def main(name: str, folder: Path) -> float:
        return importlib.import_module(name).main(folder)

    yield main
    for name in ("small", "classify_messages", "tag_orders", "reverse_and_copy"):
        sys.modules.pop(name, None)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert invoke([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_classify_messages(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("classify_messages", tmp_path / "m") >= 0.95
    answer = said(capsys, "classify", "-m", str(tmp_path / "m"), "hello, the courier with my parcel has not arrived!")
    assert answer["texts"][0]["labels"][0]["label"] == "shipping"


@pytest.mark.slow
def test_tag_orders(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tag_orders", tmp_path / "m") >= 0.95
    answer = said(capsys, "tag", "-m", str(tmp_path / "m"), "where is my order A-90210?")
    assert [span["text"] for span in answer["texts"][0]["spans"]] == ["A-90210"]


@pytest.mark.slow
def test_reverse_and_copy(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("reverse_and_copy", tmp_path / "m") >= 0.95
    assert said(capsys, "run", "-m", str(tmp_path / "m"), "r stream")["text"] == "maerts"
    model = cutaway.load(tmp_path / "m")
    best = model.generate("c stream", num_beams=4, n=2)
    assert best[0].text == "stream"
    assert best[0].score is not None
    weights = model.trace("r stream", "decoder.layers.*.cross.weights", max_tokens=6)
    assert len(weights) == 2
