"""``cutaway next``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.cli.distribution import Candidate, Distribution, divergence, draw, percent
from cutaway.cli.text import Look, width

Call = Callable[..., Any]


def distribution(*shares: float, texts: list[str] | None = None, others: int = 90) -> Distribution:
    texts = texts or [f" word{i}" for i in range(len(shares))]
    pairs = enumerate(zip(shares, texts, strict=True))
    best = tuple(Candidate(i, t, t.encode(), False, p, 9.5 - i) for i, (p, t) in pairs)
    return Distribution("a prompt", best, max(0.0, 1 - sum(shares)), 1.0, 3, others)


def test_json_is_the_models_own_distribution(call: Call, folder: Path) -> None:
    model = cutaway.load(folder)
    logits = model.logits(model.encode_prompt("the"))[0, -1]
    done = call("next", "the", "-m", folder, "--top", 5, "--json")
    assert done.code == 0
    found = done.json["candidates"]
    assert [c["token"] for c in found] == logits.topk(5).indices.tolist()
    assert [c["probability"] for c in found] == pytest.approx(logits.softmax(-1).topk(5).values.tolist(), rel=1e-4)
    assert [c["logit"] for c in found] == pytest.approx(logits.topk(5).values.tolist(), rel=1e-4)
    assert done.json["rest"] + sum(c["probability"] for c in found) == pytest.approx(1)
    p = logits.double().softmax(-1)
    assert done.json["entropy_bits"] == pytest.approx(float(-(p * p.log2()).sum()), rel=1e-4)
    assert set(found[0]) == {"rank", "token", "text", "bytes", "special", "probability", "logit"}


def test_temperature(call: Call, folder: Path) -> None:
    one, hot, cold = (
        call("next", "the", "-m", folder, "--json", "-t", t).json["candidates"][0]["probability"] for t in (1, 3, 0)
    )
    assert hot < one < cold == 1
    assert call("next", "the", "-m", folder, "-t", -1).code == 2


@pytest.mark.parametrize("temperature", [0, 1e-9, 0.01, 1, 1e30])
def test_the_order_is_that_of_the_logits_at_any_temperature(call: Call, folder: Path, temperature: float) -> None:
    model = cutaway.load(folder)
    prompt = model.encode_prompt("the")
    logits = model.logits(prompt)[0, -1]
    value = call("next", "the", "-m", folder, "--json", "-t", temperature, "--top", 20).json
    found = value["candidates"]
    assert [c["token"] for c in found] == logits.sort(descending=True, stable=True).indices[:20].tolist()
    shares = [c["probability"] for c in found]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) + value["rest"] == pytest.approx(1)
    if temperature < 0.001:
        assert found[0]["token"] == model.generate(prompt, max_tokens=1, temperature=0).tokens[0]
        assert shares == [1.0] + [0.0] * 19
        assert (value["entropy_bits"], value["rest"]) == (0, 0)


def test_of_equal_logits_the_first_is_taken_as_in_generating(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutaway.cli.distribution import predict

    model = cutaway.load(folder)
    monkeypatch.setattr(type(model), "logits", lambda self, ids: torch.tensor([[[0.0, 2.0, 1.0, 2.0, 2.0]]]))
    found, _ = predict(model, "", [1], 4, 0)
    assert [(c.id, c.probability) for c in found.best] == [(1, 1.0), (3, 0.0), (4, 0.0), (2, 0.0)]


def test_both_prompts_say_the_temperature(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert call("next", "the", "-m", folder, "--compare", "a", "-t", 0.5).out.count("temperature 0.5") == 2


def test_jsonl_has_a_candidate_a_line(call: Call, folder: Path) -> None:
    lines = call("next", "the", "-m", folder, "--jsonl", "--top", 3, "--compare", "a").out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["the"] * 3 + ["a"] * 3


@pytest.mark.parametrize("columns", [20, 30, 42, 60, 80, 120])
@pytest.mark.parametrize("plain", [False, True])
def test_every_line_fits(columns: int, plain: bool) -> None:
    texts = [" Paris", "\n", "日本語日本語", "\x1b[2J", " ", "", "x" * 50]
    lines = draw(distribution(0.5, 0.2, 0.1, 0.05, 0.01, 0.001, 0.0001, texts=texts), Look(columns, plain=plain))
    assert all(width(line) <= columns for line in lines)
    assert len(lines) == 8
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert text.isascii() == plain
    if columns >= 42:
        assert ("_Paris" if plain else "·Paris") in text
        assert ("\\n" if plain else "⏎") in text


def test_bars_are_in_proportion() -> None:
    lines = draw(distribution(0.4, 0.2, 0.1, others=0), Look(60))
    bars = [sum(1.0 if c == "█" else "▏▎▍▌▋▊▉".index(c) / 8 + 1 / 8 for c in line if c in "█▏▎▍▌▋▊▉") for line in lines]
    assert bars[0] / bars[1] == pytest.approx(2, rel=0.02)
    assert bars[0] / bars[2] == pytest.approx(4, rel=0.02)
    assert [percent(0.4), percent(0), percent(1e-5)] == ["40.0 %", "0.0 %", "<0.1 %"]


def test_half_characters_and_control_tokens_are_shown_as_such(call: Call, folder: Path) -> None:
    best = (Candidate(1, "\ufffd", b"\xe2\x80", False, 0.6, 1.0), Candidate(2, "<|end|>", b"<|end|>", True, 0.4, 0.0))
    lines = draw(Distribution("", best, 0.0, 1.0, 1, 0), Look(60, colour=True))
    assert "<E2 80>" in lines[0]
    assert "\x1b[35m<|end|>" in lines[1]
    shown = call("next", "the", "-m", folder, "--top", 262).out
    assert "<|im_end|>" in shown
    assert "others" not in shown


@pytest.mark.parametrize("columns", [40, 80])
def test_two_prompts_beside_or_below_each_other(
    call: Call, folder: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = call("next", "the cat", "-m", folder, "--compare", "a dog", "--top", 4)
    assert done.code == 0
    lines = done.out.splitlines()
    assert all(width(line) <= columns for line in lines)
    together = [line for line in lines if "the cat" in line and "a dog" in line]
    assert len(together) == (columns == 80)
    assert "in both lists" in lines[-1]
    value = call("next", "the cat", "-m", folder, "--compare", "the cat", "--json").json
    assert value["jensen_shannon_bits"] == pytest.approx(0, abs=1e-9)
    assert value["compare"]["candidates"] == value["candidates"]


def test_divergence_is_one_bit_where_nothing_is_shared() -> None:
    p, q = (torch.tensor(row, dtype=torch.float64).log() for row in ([1.0, 0.0], [0.0, 1.0]))
    assert divergence(p, q) == pytest.approx(1)
    assert divergence(p, p) == 0


def test_colour_only_on_a_terminal_that_wants_it(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" in call("next", "the", "-m", folder, stdout_tty=True).out
    assert "\x1b[" not in call("next", "the", "-m", folder).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in call("next", "the", "-m", folder, stdout_tty=True).out
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in call("next", "the", "-m", folder, stdout_tty=True).out


def test_what_makes_no_sense(call: Call, folder: Path) -> None:
    assert call("next", "the", "-m", folder, "--top", 0).code == 2
    assert call("next", stdin_tty=True).code == 2
    assert call("next", "-m", folder, stdin=b"").code == 3
    assert call("next", "-m", folder, stdin=b"the\n").out == call("next", "the", "-m", folder).out
