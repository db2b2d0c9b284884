"""``--kv-dtype int8`` reaches the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutaway.model import Model

Call = Callable[..., Any]


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_eight_bits(call: Call, folder: Path, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, stream = [], Model.stream
    monkeypatch.setattr(Model, "stream", lambda self, *a, **how: asked.append(how) or stream(self, *a, **how))
    words = (verb, "the", "-m", folder, "-n", 6, "-t", 0, "--json")
    plain, small = call(*words).json, call(*words, "--kv-dtype", "int8").json
    assert ("kv_dtype" in asked[0], asked[1]["kv_dtype"]) == (False, "int8")
    assert (plain["settings"]["kv_dtype"], small["settings"]["kv_dtype"]) == (None, "int8")


def test_the_numbers_are_other_ones(call: Call, folder: Path) -> None:
    words = ("run", "the he the", "-m", folder, "-n", 1, "-t", 0, "--json", "--logprobs", 0)
    plain, small = (call(*words, *more).json["logprobs"][0]["logprob"] for more in ((), ("--kv-dtype", "int8")))
    assert 0 < abs(plain - small) < 0.5


def test_another(call: Call, folder: Path) -> None:
    done = call("run", "the", "-m", folder, "--kv-dtype", "int4")
    assert (done.code, done.out) == (2, "")
    assert "int8" in done.err
