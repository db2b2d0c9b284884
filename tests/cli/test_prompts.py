"""``cutaway run --prompts``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutaway

Call = Callable[..., Any]
TEXTS = ["the end", "a", "the the"]
HOW = ("-n", 4, "-t", 1, "--seed", 5)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def test_a_file_of_answers(call: Call, folder: Path, prompts: Path, tmp_path: Path) -> None:
    """The library's, with a word about them; what is there is kept, as JSON if asked."""
    model, out = cutaway.load(folder), tmp_path / "out.jsonl"
    words = ("run", "--prompts", prompts, "-m", folder, *HOW, "-o", out)
    done = call(*words, "--batch", 2, "--logprobs", 1)
    assert (done.code, done.out, done.err) == (0, "", f"wrote 3 answers to {out}\n")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    for i, (line, text) in enumerate(zip(found, TEXTS, strict=True)):
        wanted = model.generate(text, max_tokens=4, temperature=1, seed=5 + i)
        assert (line["index"], line["tokens"], line["text"]) == (i, wanted.tokens, wanted.text)
        assert len(line["logprobs"][0]["top"]) == 1
    whole = out.read_bytes()
    out.write_bytes(whole[:-5])
    done = call(*words, "--logprobs", 1, "--stats")
    assert done.err.startswith("4 tokens in ")
    assert done.err.endswith(f"wrote 1 answer to {out}; 2 answers had been there\n")
    assert out.read_bytes() == whole
    value = call(*words, "--logprobs", 1, "--json").json
    assert value["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    assert (value["out"], value["prompts"], value["kept"], value["written"]) == (str(out), 3, 3, 0)
    assert call(*words, "--logprobs", 1, "-q").err == ""


def test_answers_printed(call: Call, folder: Path, prompts: Path) -> None:
    """Without -o, or from a pipe, a line each on standard output."""
    done = call("run", "--prompts", prompts, "-m", folder, *HOW)
    assert [json.loads(line)["index"] for line in done.out.splitlines()] == [0, 1, 2]
    assert done.err == ""
    piped = call("run", "--prompts", "-", "-m", folder, *HOW, stdin=prompts.read_bytes())
    assert piped.out == done.out
    texts = call("run", "--prompts", "-", "-m", folder, *HOW, stdin=("\n".join(TEXTS) + "\n").encode())
    assert texts.out == done.out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("hello",), "PROMPT about one"),
        (("--echo",), "--echo about one"),
        (("--special",), "--special about one"),
        (("--restart",), "--restart with --prompts needs -o"),
        (("--json",), "needs -o"),
        (("--batch", 0), "batch"),
    ],
)
def test_what_does_not_go_with_a_file(
    call: Call, folder: Path, prompts: Path, flags: tuple[Any, ...], says: str
) -> None:
    done = call("run", "--prompts", prompts, "-m", folder, *flags)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    for alone in (("--batch", 2), ("--restart",)):
        done = call("run", "hi", "-m", folder, *alone)
        assert done.code == 2
        assert "goes with --prompts" in done.err


def test_what_is_wrong_is_said_in_one_line(call: Call, folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Bad input, with file and line; other settings; somebody else at work."""
    from cutaway.formats.lock import locked

    out = tmp_path / "out"
    words = ("run", "--prompts", prompts, "-m", folder, *HOW, "-o", out)
    good = prompts.read_text()
    prompts.write_text(good + '{"prompt": 1}\n')
    done = call(*words)
    assert (done.code, done.out, out.exists()) == (3, "", False)
    assert done.err.splitlines()[0] == f"error: {prompts}:4: prompt: is not a prompt"
    assert call(*words, "--json").error["path"] == f"{prompts}:4"
    prompts.write_text(good)
    assert call(*words).code == 0
    done = call(*words, "--top-k", 3)
    assert done.code == 3
    assert done.err.splitlines()[0] == f"error: {out}: top_k: was made with other settings"
    assert "--restart" in done.err
    assert call(*words, "--top-k", 3, "--restart").code == 0
    with locked(out):
        done = call(*words)
    assert done.code == 4
    assert "somebody else is writing there" in done.err
    assert call("run", "--prompts", tmp_path / "none", "-m", folder).code == 4
