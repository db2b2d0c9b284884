"""``--draft`` and ``--draft-tokens``, of ``run`` and ``chat``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutaway.cli.guessing import _MOST
from cutaway.generation.drafting import MOST_TOKENS
from tests.cli.conftest import config, write_folder

Call = Callable[..., Any]


def test_the_bounds_are_the_librarys() -> None:
    assert _MOST == MOST_TOKENS


@pytest.mark.parametrize("heat", [0, 1])
def test_the_text_is_the_same_and_what_was_guessed_is_told(call: Call, folder: Path, heat: int) -> None:
    words = ("run", "the end the end the", "-m", folder, "-n", 20, "-t", heat, "--seed", 4)
    plain = call(*words, "--json").json
    assert "speculation" not in plain
    for draft in ("prompt", folder):
        done = call(*words, "--draft", draft, "--draft-tokens", 3, "--json")
        assert (done.code, done.err) == (0, "")
        assert done.json["tokens"] == plain["tokens"]
        found = done.json["speculation"]
        assert set(found) == {"proposed", "accepted", "passes", "acceptance"}
        assert found["acceptance"] == (found["accepted"] / found["proposed"] if found["proposed"] else None)
        if draft == folder:
            assert found["passes"] == 6  # of one, then four, then four …
        assert call(*words, "--draft", draft).out == plain["text"] + "\n"


def test_stats(call: Call, folder: Path) -> None:
    words = ("run", "the", "-m", folder, "-n", 20, "-t", 1, "--seed", 1, "--stats")
    done = call(*words, "--draft", folder, "--answers", 2)
    found = re.search(r"guessed (\d+) tokens, (\d+) right \((\d+)%\), \d\.\d\d tokens a pass", done.err)
    assert found is not None
    assert (found[1], found[3]) == (found[2], "100")
    assert "guessed" not in call(*words).err
    done = call("run", "the", "-m", folder, "-n", 1, "--draft", "prompt", "--stats")
    assert "guessed 0 tokens, 0 right, 1.00 tokens a pass" in done.err


def test_chat(call: Call, folder: Path) -> None:
    plain = call("chat", "hi", "-m", folder, "-n", 9, "-t", 0).out
    done = call("chat", "hi", "-m", folder, "-n", 9, "-t", 0, "--draft", folder, "--stats")
    assert (done.code, done.out) == (0, plain)
    assert "guessed 6 tokens, 6 right (100%)" in done.err
    lines = call("chat", "-m", folder, "-n", 9, "-t", 0, "--draft", "prompt", "--stats", stdin=b"hi\n/set\nho\n")
    assert lines.code == 0
    assert lines.err.count("guessed") == 2
    assert lines.out.startswith(plain)


def test_what_does_not_go_together(call: Call, folder: Path, base_folder: Path, tmp_path: Path) -> None:
    for words, says in (
        (("--draft-tokens", 3), "who guesses"),
        (("--draft", "prompt", "--num-beams", 2), "beams take no draft"),
        (("--draft", "prompt", "--draft-tokens", 0), "not a number in range"),
        (("--draft", "prompt", "--draft-tokens", 65), "not a number in range"),
        (("--draft", ""), "empty"),
    ):
        done = call("run", "a", "-m", folder, *words)
        assert (done.code, done.out) == (2, "")
        assert says in done.err
    small = write_folder(tmp_path / "small", config(vocab_size=300))
    done = call("run", "a", "-m", folder, "--draft", small)
    assert (done.code, done.out) == (3, "")
    assert "another vocabulary" in done.err
    assert call("run", "a", "-m", folder, "--draft", tmp_path / "none").code == 3
    assert (
        call("run", "the", "-m", folder, "-n", 3, "-t", 0, "--draft", base_folder).code == 0
    )  # another family will do
