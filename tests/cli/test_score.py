"""``cutaway score``: log-probabilities of a text, and what they come to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.cli.main import VERBS

Call = Callable[..., Any]
TEXT = "the héllo 🙂"


def test_the_numbers_are_the_models(call: Call, folder: Path) -> None:
    """By hand: of the logits of one plain pass, in double precision."""
    model = cutaway.load(folder)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(TEXT)
    rows = model.logits(ids)[0].double().log_softmax(-1)
    wanted = rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    value = call("score", TEXT, "-m", folder, "--json", "--top", 2).json
    assert [one["token"] for one in value["tokens"]] == ids
    assert value["tokens"][0]["logprob"] is None
    assert [one["logprob"] for one in value["tokens"][1:]] == pytest.approx(wanted.tolist(), abs=1e-4)
    best = rows[:-1].topk(2).indices.tolist()
    assert [[top["token"] for top in one["top"]] for one in value["tokens"]] == [[], *best]
    assert value["logprob"] == pytest.approx(float(wanted.sum()), abs=1e-3)
    assert value["perplexity"] == pytest.approx(math.exp(-float(wanted.mean())), rel=1e-4)
    size = len(TEXT.encode()) - len(model.tokenizer.token_bytes(ids[0]))
    assert value["bits_per_byte"] == pytest.approx(-float(wanted.sum()) / math.log(2) / size, rel=1e-4)
    assert value["bits_per_byte"] != pytest.approx(value["perplexity"], rel=0.1)


def test_as_a_table_and_as_lines(call: Call, folder: Path) -> None:
    value = call("score", TEXT, "-m", folder, "--json").json
    done = call("score", "-m", folder, stdin=f"{TEXT}\n".encode())
    *table, nothing, facts = done.out.splitlines()
    assert (done.code, nothing, len(table)) == (0, "", len(value["tokens"]))
    assert table[0].split()[-1] == "–"
    assert table[-1].split()[-1] == f"{value['tokens'][-1]['logprob']:.3f}"
    for word in (f"{value['logprob']:.3f}", f"{value['perplexity']:,.2f}", f"{value['bits_per_byte']:.3f}"):
        assert word in facts
    lines = [json.loads(line) for line in call("score", TEXT, "-m", folder, "--jsonl").out.splitlines()]
    assert lines == value["tokens"]


def test_one_token_has_nothing_before_it(call: Call, folder: Path) -> None:
    done = call("score", "a", "-m", folder)
    assert (done.code, done.out.splitlines()[-1]) == (0, "1 token · log-probability 0.000")
    value = call("score", "a", "-m", folder, "--json").json
    assert (value["perplexity"], value["bits_per_byte"]) == (None, None)


def test_what_it_refuses(call: Call, folder: Path) -> None:
    assert call("score", stdin_tty=True).code == 2
    done = call("score", "a", "-m", folder, "--target", "b")
    assert (done.code, done.out) == (3, "")
    assert "target" in done.err
    assert "score" in VERBS["Use a model"]
