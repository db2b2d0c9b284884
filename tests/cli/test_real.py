"""The verbs with the model that people try first, loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutaway
import cutaway.store

pytestmark = pytest.mark.real
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def loaded(smollm2_path: Path) -> cutaway.Model:
    return cutaway.load(smollm2_path)


@pytest.fixture
def smollm2(loaded: cutaway.Model, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cutaway.store, "load", lambda *_, **__: loaded)
    return smollm2_path


def test_run_knows_paris(call: Call, smollm2: Path) -> None:
    done = call("run", "The capital of France is", "-m", smollm2, "-n", 4, "-t", 0)
    assert (done.code, done.out.split()[0]) == (0, "Paris.")


def test_next_expects_paris(call: Call, smollm2: Path) -> None:
    done = call("next", "The capital of France is", "-m", smollm2)
    assert done.code == 0
    assert done.out.splitlines()[3].startswith("·Paris")


def test_chat_answers(call: Call, smollm2: Path) -> None:
    done = call("chat", "What is the capital of France?", "-m", smollm2, "-n", 8, "-t", 0)
    assert done.code == 0
    assert "Paris" in done.out


def test_show_at_a_glance(call: Call, smollm2_path: Path) -> None:
    done = call("show", smollm2_path)
    assert done.code == 0
    assert all(fact in done.out for fact in ("layers 0–29", "134,515,008", "Q4_1", "30 × 3.5M"))


def test_tokenize(call: Call, smollm2_path: Path) -> None:
    value = call("tokenize", "Hello, world", "-m", smollm2_path, "--json").json
    assert [t["text"] for t in value["tokens"]] == ["Hello", ",", " world"]
