"""``cutaway models``, ``pull``, ``doctor`` and ``completion``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cutaway.checkpoints.catalog import ENTRIES
from cutaway.cli import selftest

Call = Callable[..., Any]


def test_models(call: Call, tmp_path: Path) -> None:
    done = call("models")
    assert done.code == 0
    assert all(entry.name in done.out and entry.licence in done.out for entry in ENTRIES)
    assert "cutaway pull" in done.out
    value = call("models", "--json").json["models"]
    assert [entry["name"] for entry in value] == [entry.name for entry in ENTRIES]
    assert set(value[0]) >= {"name", "family", "bytes", "licence", "here", "path", "default"}
    assert not any(entry["here"] for entry in value)
    lines = call("models", "--jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == value
    home = Path(value[0]["path"])
    home.parent.mkdir(parents=True)
    with home.open("wb") as file:
        file.truncate(value[0]["bytes"])
    assert call("models", "--json").json["models"][0]["here"] is True
    assert str(home) in call("models").out


def test_models_into_a_file(call: Call, tmp_path: Path) -> None:
    done = call("models", "--json", "-o", tmp_path / "m.json")
    assert (done.code, done.out) == (0, "")
    assert json.loads((tmp_path / "m.json").read_text())["models"]


def test_pull(call: Call, folder: Path) -> None:
    done = call("pull", folder)
    assert (done.code, done.out) == (0, f"{folder}\n")
    value = call("pull", folder, "--json").json
    assert value["kind"] == "folder"
    assert value["bytes"] > 0
    done = call("pull", "smollm2", "--offline", "--json")
    assert (done.code, done.error["code"]) == (5, "offline")
    assert call("pull").code == 2
    assert call("pull", "some/where", "--offline").code == 5
    assert call("pull", "smollm2", "--revision", "x").code == 3


def test_doctor(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("doctor", "--json")
    assert done.code == 0
    value = done.json
    assert value["ok"] is True
    assert value["versions"]["torch"] == torch.__version__
    assert {check["ok"] for check in value["self_test"]} == {True}
    assert len(value["self_test"]) == 4
    checks = [selftest.Check("a check", 0.0, True, 0.0)]
    monkeypatch.setattr(selftest, "run", lambda: checks)
    text = call("doctor", "--offline").out
    for word in ("python", "threads", "compiler", "hub cache", "self-test", "ok", "memory", "blas"):
        assert word in text


def test_doctor_finds_wrong_numbers(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = selftest._explicit
    monkeypatch.setattr(selftest, "_explicit", lambda model, ids: plain(model, ids) + 0.1)
    done = call("doctor")
    assert done.code == 70
    assert "FAILED" in done.out
    assert not selftest._compare("numbers", torch.zeros(2), lambda: torch.tensor([0.0, float("nan")])).ok


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(call: Call, shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.shell_completion import BashComplete

    monkeypatch.setattr(BashComplete, "_check_version", staticmethod(lambda: None))
    done = call("completion", shell)
    assert done.code == 0
    assert "_CUTAWAY_COMPLETE" in done.out
    assert call("completion", "tcsh").code == 2


def test_completion_of_verbs_flags_and_models(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_CUTAWAY_COMPLETE", "bash_complete")
    for words, place, wanted in (
        ("cutaway sh", 1, "show"),
        ("cutaway run --top", 2, "--top-k"),
        ("cutaway show smo", 2, "smollm2"),
        ("cutaway run -m ge", 3, "gemma3-270m"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(place))
        assert wanted in call().out


@pytest.mark.parametrize("name", ["", " ", "\t\n"])
def test_an_empty_name_is_no_model(call: Call, name: str) -> None:
    for words in (("pull", name), ("show", name), ("run", "hi", "-m", name), ("tokenize", "hi", "-m", name)):
        done = call(*words, "--json")
        assert (done.code, done.out, done.error["code"]) == (3, "", "request"), words
        assert "name is empty" in done.error["message"]
    done = call("pull", "smollm2", "--revision", name)
    assert done.code == 3
    assert "revision is empty" in done.err
    assert call("models", "-o", "").code == 2
