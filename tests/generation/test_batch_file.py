"""A file of prompts in, a file of answers out: the right ones, in order, whatever happens on the way."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.errors import (
    ContextExceeded,
    CutawayError,
    DatasetError,
    FormatError,
    LockedError,
    RequestError,
    ResumeMismatch,
    StorageError,
    TemplateError,
)
from cutaway.formats import lock
from cutaway.formats.lock import locked
from cutaway.generation import batch_file
from cutaway.generation.progress import Tally
from cutaway.generation.result import Usage
from cutaway.model import Model
from tests.cli.conftest import config, vocabulary, write_folder
from tests.reference import tiny, tiny_seq2seq

HOW: dict[str, Any] = {"max_tokens": 5, "temperature": 1.0, "seed": 3}
TEXTS = ["the end", "a", "the the the the", "", "🙂 é", "the end of the", "x" * 30, "b", "c d", "the", "e f g h"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("batch") / "tiny", config())


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return cutaway.load(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "prompts.jsonl", *({"prompt": text, "id": f"p{i}"} for i, text in enumerate(TEXTS)))


def jsonl(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().decode().removesuffix("\n").split("\n")]


def answered(model: Model, source: Path, **how: Any) -> list[dict[str, Any]]:
    out = source.with_name("answers.jsonl")
    model.generate_file(source, out, **{**HOW, **how})
    return lines(out)


# ── the right answers ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_each_is_what_generate_gives(model: Model, source: Path, batch: int) -> None:
    """In the order of the prompts, each with the seed that is its own, whatever it is answered with."""
    report = model.generate_file(source, source.with_name("out"), batch=batch, logprobs=1, **HOW)
    found = lines(source.with_name("out"))
    wanted = [model.generate(text, logprobs=1, **{**HOW, "seed": 3 + i}) for i, text in enumerate(TEXTS)]
    assert [line["index"] for line in found] == list(range(len(TEXTS)))
    assert [line["id"] for line in found] == [f"p{i}" for i in range(len(TEXTS))]
    assert [line["tokens"] for line in found] == [one.tokens for one in wanted]
    assert [line["text"] for line in found] == [one.text for one in wanted]
    assert [line["finish_reason"] for line in found] == [one.finish_reason for one in wanted]
    for line, one in zip(found, wanted, strict=True):
        assert one.logprobs is not None
        numbers = [entry["logprob"] for entry in line["logprobs"]]
        assert numbers == pytest.approx([entry.logprob for entry in one.logprobs], abs=1e-4)
        assert line["usage"]["total_tokens"] == one.usage.total_tokens
    assert (report.prompts, report.kept, report.usage) == (len(TEXTS), 0, Usage.of(wanted))
    assert len({line["run"] for line in found}) == 1


def test_the_same_prompt_again_is_drawn_anew(model: Model, tmp_path: Path) -> None:
    found = answered(model, jsonl(tmp_path / "p.jsonl", *[{"prompt": "the"}] * 4))
    assert len({tuple(line["tokens"]) for line in found}) == 4


def test_a_seed_at_the_end_of_its_range(model: Model, tmp_path: Path) -> None:
    last = 2**63 - 1
    found = answered(model, jsonl(tmp_path / "p.jsonl", *[{"prompt": "the"}] * 2), seed=last)
    for line, seed in zip(found, (last, -(2**63)), strict=True):
        assert line["tokens"] == model.generate("the", **{**HOW, "seed": seed}).tokens


def test_texts_messages_ids_and_a_pipe(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, one prompt: of a plain file an empty one too, its last end or not, with \\r or a byte order mark."""
    how = {**HOW, "temperature": 0}
    wanted = [model.generate(text, **how).text for text in ("the end", "", "{a")]
    for name, data in (
        ("a.txt", b"the end\n\n{a"),
        ("b.txt", b"the end\r\n\r\n{a\r\n"),
        ("c.prompts", b"\xef\xbb\xbfthe end\n\n{a\n"),
    ):
        (tmp_path / name).write_bytes(data)
        assert [line["text"] for line in answered(model, tmp_path / name, temperature=0, restart=True)] == wanted
    messages = [{"role": "user", "content": "hi"}]
    ids = model.encode_prompt("the end")
    values = [{"messages": messages}, {"prompt": ids}, {"prompt": "the end"}]
    found = answered(model, jsonl(tmp_path / "d.jsonl", *values), temperature=0, restart=True)
    assert [line["tokens"] for line in found] == [one.tokens for one in model.generate([messages, ids, ids], **how)]

    piped = io.TextIOWrapper(io.BytesIO((tmp_path / "d.jsonl").read_bytes() + b"\n \n"))
    monkeypatch.setattr(sys, "stdin", piped)
    model.generate_file("-", tmp_path / "piped", **how)
    assert [line["tokens"] for line in lines(tmp_path / "piped")] == [line["tokens"] for line in found]


def test_printed(model: Model, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing is kept, the lines are the same but for the name of the run."""
    wanted = answered(model, source)
    capsys.readouterr()
    model.generate_file(source, "-", **HOW)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [{key: value for key, value in line.items() if key != "run"} for line in wanted]


def test_several_answers_and_beams(model: Model, source: Path) -> None:
    """A prompt counts once (case V05)."""
    for how in ({"n": 3}, {"num_beams": 3, "n": 2, "temperature": 0}):
        for i, line in enumerate(answered(model, source, restart=True, **how)):
            wanted = model.generate(TEXTS[i], **{**HOW, **how, "seed": 3 + i})
            assert [choice["tokens"] for choice in line["choices"]] == [one.tokens for one in wanted]
            assert (line["text"], line["tokens"]) == (wanted[0].text, wanted[0].tokens)
            assert line["usage"]["prompt_tokens"] == wanted[0].usage.prompt_tokens
            assert line["usage"]["completion_tokens"] == sum(len(one.tokens) for one in wanted)


def test_a_line_may_ask_for_something_else(model: Model, tmp_path: Path) -> None:
    """Any option, by its name; null is as if it were not there."""
    own = [
        {},
        {"max_tokens": 2},
        {"temperature": 0},
        {"seed": 77},
        {"logit_bias": {"9": 50.0}, "max_tokens": 3},
        {"max_tokens": 0, "prompt_logprobs": 1},
        {"choices": ["yes", "no"]},
        {"n": 2, "top_k": None},
        {"num_beams": 2, "temperature": 0, "max_tokens": 4},
        {"deterministic": True},
        {"stop": ["e"]},
    ]
    found = answered(model, jsonl(tmp_path / "p.jsonl", *({"prompt": "the", **one} for one in own)), batch=4)
    for i, (line, one) in enumerate(zip(found, own, strict=True)):
        given = {**HOW, "seed": HOW["seed"] + i, **{key: value for key, value in one.items() if value is not None}}
        if "logit_bias" in given:
            given["logit_bias"] = {9: 50.0}
        wanted = model.generate("the", **given)
        wanted = wanted if isinstance(wanted, list) else [wanted]
        assert line["tokens"] == wanted[0].tokens, one
        assert ("prompt_logprobs" in line) == ("prompt_logprobs" in one)
    assert found[4]["tokens"] == [9, 9, 9]


def test_an_encoder_decoder(tmp_path: Path) -> None:
    model = cutaway.load(tiny_seq2seq.write(tiny_seq2seq.config("t5"), tmp_path / "t5"))
    prompts = [tiny.ids(n, seed=n).tolist() for n in (5, 9, 2)]
    found = answered(model, jsonl(tmp_path / "p.jsonl", *({"prompt": ids} for ids in prompts)), temperature=0)
    assert [line["tokens"] for line in found] == [
        one.tokens for one in model.generate(prompts, **{**HOW, "temperature": 0})
    ]
    assert found[0]["text"] == ""


def test_lines_are_lines_for_everybody(model: Model, tmp_path: Path) -> None:
    """What some readers take for a line's end is escaped; the rest is as it is."""
    text = "a\u2028b\x85c\u2029é\x0b"
    choices = {"choices": [text], "logprobs": None}
    (line,) = answered(model, jsonl(tmp_path / "p.jsonl", {"prompt": "the", **choices}), max_tokens=40)
    assert line["text"] == text
    raw = (tmp_path / "answers.jsonl").read_bytes().decode()
    assert len(raw.splitlines()) == raw.count("\n") == 1
    assert "é" in raw


def test_progress_of_a_file(model: Model, source: Path) -> None:
    told: list[Tally] = []
    report = model.generate_file(source, source.with_name("out"), batch=2, progress=told.append, **HOW)
    assert told[-1] == Tally(len(TEXTS), len(TEXTS), report.usage.completion_tokens)
    assert [tally.finished for tally in told] == sorted(tally.finished for tally in told)


def test_less_is_padded(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of about one length are read together."""
    values = [{"prompt": [5] * (40 if i % 4 == 0 else 2)} for i in range(16)]
    tables: list[torch.Size] = []
    hidden = model.transformer.hidden

    def watched(ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        tables.append(ids.shape)
        return hidden(ids, *rest, **more)

    monkeypatch.setattr(model.transformer, "hidden", watched)
    answered(model, jsonl(tmp_path / "p.jsonl", *values), batch=4, max_tokens=1)
    assert sorted(tables) == [(4, 2), (4, 2), (4, 2), (4, 40)]


# ── what is wrong is found before anything runs ──────────────────────────────────────────────────────────────

GOOD = b'{"prompt": "the"}\n'
WRONG: list[tuple[bytes, int, str, type[CutawayError]]] = [
    (b"", 0, "holds no prompts", DatasetError),
    (b"\n \n", 0, "holds no prompts", DatasetError),
    (GOOD + b"{\n" + GOOD, 2, "is not JSON", DatasetError),
    (GOOD + b"\n" + GOOD, 2, "is empty", DatasetError),
    (GOOD + b'{"prompt": "a", "prompt": "b"}', 2, "twice", DatasetError),
    (GOOD + b'{"prompt": NaN}', 2, "not finite", DatasetError),
    (GOOD + b'{"prompt": "\xff"}', 2, "UTF-8", DatasetError),
    (b"[1]\n", 1, "is not a JSON object", DatasetError),
    (GOOD + b"{}", 2, "does not say what to answer", DatasetError),
    (GOOD + b'{"prompt": "a", "messages": []}', 2, "both", DatasetError),
    (GOOD + b'{"prompt": 5}', 2, "is not a prompt", DatasetError),
    (GOOD + b'{"prompt": null}', 2, "is not a prompt", DatasetError),
    (GOOD + b'{"messages": "hi"}', 2, "are not messages", DatasetError),
    (GOOD + b'{"messages": []}', 2, "are not messages", DatasetError),
    (GOOD + b'{"prompt": []}', 2, "the prompt is empty", DatasetError),
    (GOOD + b'{"prompt": [1, 99999]}', 2, "not a token of this vocabulary", DatasetError),
    (GOOD + b'{"prompt": [1, "a"]}', 2, "not a token", DatasetError),
    (GOOD + b'{"prompt": "a", "tempurature": 1}', 2, "tempurature: unknown argument", DatasetError),
    (GOOD + b'{"prompt": "a", "progress": true}', 2, "unknown argument", DatasetError),
    (GOOD + b'{"prompt": "a", "temperature": -1}', 2, "temperature", DatasetError),
    (GOOD + b'{"prompt": "a", "seed": 1.5}', 2, "seed", DatasetError),
    (GOOD + b'{"prompt": "a", "logit_bias": {"x": 1}}', 2, "logit_bias", DatasetError),
    (GOOD + b'{"prompt": "a", "schema": {"type": "nothing"}}', 2, "schema", DatasetError),
    (GOOD + b'{"prompt": "a", "n": 3, "num_beams": 2, "temperature": 0}', 2, "more answers", DatasetError),
]


@pytest.mark.parametrize(("data", "line", "says", "kind"), WRONG, ids=[says for _, _, says, _ in WRONG])
def test_lines_that_make_no_sense(
    model: Model, tmp_path: Path, data: bytes, line: int, says: str, kind: type[CutawayError]
) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "out"
    path.write_bytes(data)
    with pytest.raises(kind) as caught:
        model.generate_file(path, out, **HOW)
    assert caught.value.path == (f"{path}:{line}" if line else str(path))
    assert str(caught.value).startswith(f"{caught.value.path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == [path]


def test_other_things_that_make_no_sense(model: Model, source: Path, tmp_path: Path, base_model: Model) -> None:
    def refused(kind: type[CutawayError], *arguments: Any, **more: Any) -> CutawayError:
        with pytest.raises(kind) as caught:
            (more.pop("model", model)).generate_file(*arguments, **{**HOW, **more})
        return caught.value

    out = tmp_path / "out"
    for name, value in (("temperature", -1), ("batch", 0), ("batch", True), ("restart", 1), ("tempo", 1), ("n", 0)):
        assert refused(RequestError, source, out, **{name: value}).field == name
    assert refused(RequestError, source, source).field == "out"
    os.link(source, tmp_path / "same")
    assert refused(RequestError, source, tmp_path / "same").field == "out"
    refused(StorageError, tmp_path / "none", out)
    refused(FormatError, tmp_path, out)
    refused(StorageError, source, tmp_path / "none" / "out")
    refused(StorageError, source, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    refused(StorageError, source, tmp_path / "pipe")
    refused(FormatError, tmp_path / "pipe", out)
    long = jsonl(tmp_path / "long.jsonl", {"prompt": "a"}, {"prompt": [5] * 65})
    error = refused(ContextExceeded, long, out, model=base_model)
    assert error.path == f"{long}:2"
    error = refused(TemplateError, jsonl(tmp_path / "m.jsonl", {"messages": [{"role": "user"}]}), out, model=base_model)
    assert error.path == f"{tmp_path / 'm.jsonl'}:1"
    empty = tmp_path / "empty.txt"
    empty.write_text("a\n\n")
    mute = Model(model.transformer)
    assert "without a tokenizer" in str(refused(DatasetError, empty, out, model=mute))
    assert not out.exists()


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A GPT-2 with a table of 64 positions and no chat template."""
    values = {**tiny.config("gpt2"), "vocab_size": len(vocabulary()), "bos_token_id": 0, "eos_token_id": 0}
    return cutaway.load(write_folder(tmp_path_factory.mktemp("batch") / "base", values, template=None))


# ── going on ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", [{}, {"deterministic": True}, pytest.param({"n": 2}, marks=pytest.mark.slow)], ids=str)
def test_cut_off_anywhere(model: Model, source: Path, how: dict[str, Any]) -> None:
    """Whatever part of the file was written, the rest comes to it: the bytes are those of one run."""
    out, how = source.with_name("out"), {**HOW, "max_tokens": 3, "batch": 2, "logprobs": 2, **how}
    model.generate_file(source, out, **how)
    wanted, chance = out.read_bytes(), random.Random(0)
    ends = [i + 1 for i, byte in enumerate(wanted) if byte == ord("\n")]
    sizes = [*chance.sample(ends, 3), *(end - 1 for end in chance.sample(ends, 2)), 0]
    for size in [*sizes, *chance.sample(range(len(wanted)), 3)]:
        out.write_bytes(wanted[:size])
        report = model.generate_file(source, out, **how)
        assert out.read_bytes() == wanted, size
        assert report.kept == wanted[:size].count(b"\n")
    assert model.generate_file(source, out, **how).usage == Usage(0, 0)  # nothing is left to do
    assert out.read_bytes() == wanted


def test_only_what_is_missing_is_computed(model: Model, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = source.with_name("out")
    model.generate_file(source, out, batch=2, **HOW)
    wanted = out.read_bytes()
    out.write_bytes(b"".join(wanted.splitlines(True)[:7]))
    passes: list[int] = []
    hidden = model.transformer.hidden
    monkeypatch.setattr(
        model.transformer, "hidden", lambda ids, *r, **m: passes.append(len(ids)) or hidden(ids, *r, **m)
    )
    model.generate_file(source, out, batch=2, **HOW)
    assert out.read_bytes() == wanted
    assert len(passes) <= 15  # of one batch of the first four, and of two later ones; all of them take thirty


def test_without_a_seed_it_goes_on_with_the_one_it_drew(model: Model, source: Path) -> None:
    out, how = source.with_name("out"), {"max_tokens": 5, "temperature": 1.0}
    model.generate_file(source, out, **how)
    wanted = out.read_bytes()
    out.write_bytes(wanted[: len(wanted) // 2])
    model.generate_file(source, out, **how)
    assert out.read_bytes() == wanted
    out.unlink()
    model.generate_file(source, out, **how)
    assert out.read_bytes() != wanted  # begun anew


def test_another_batch_goes_on(model: Model, source: Path) -> None:
    """After running out of memory, say: with ``deterministic`` the bytes are the same. Left out, it is as before."""
    out, how = source.with_name("out"), {**HOW, "deterministic": True, "logprobs": 1}
    model.generate_file(source, out, batch=4, **how)
    wanted = out.read_bytes()
    for batch in (1, 3, 16):
        out.write_bytes(wanted[: len(wanted) // 2])
        model.generate_file(source, out, batch=batch, **how)
        assert out.read_bytes() == wanted
    how["deterministic"] = False
    model.generate_file(source, out, batch=3, restart=True, **how)
    wanted = out.read_bytes()
    out.write_bytes(wanted[: len(wanted) // 2])
    model.generate_file(source, out, **how)
    assert out.read_bytes() == wanted


def test_what_differs_is_named(model: Model, source: Path, tmp_path: Path) -> None:
    """Other prompts, another model, other settings: refused, and what is there stays; ``restart`` begins anew."""
    out = tmp_path / "out"
    model.generate_file(source, out, **HOW)
    wanted = out.read_bytes()

    def field(model: Model, source: Path, **how: Any) -> tuple[str | None, str | None, str | None]:
        with pytest.raises(ResumeMismatch) as caught:
            model.generate_file(source, out, **{**HOW, **how})
        assert out.read_bytes() == wanted
        assert caught.value.path == str(out)
        assert "restart" in (caught.value.hint or "")
        return caught.value.field, caught.value.expected, caught.value.got

    other = jsonl(tmp_path / "other.jsonl", *({"prompt": text} for text in TEXTS))
    assert field(model, other)[0] == "source/sha256"
    assert field(model, jsonl(other, {"prompt": "a"})) == ("source/prompts", "11", "1")
    assert field(model, source, temperature=0.5) == ("temperature", "1.0", "0.5")
    assert field(model, source, seed=4) == ("seed", "3", "4")
    assert field(model, source, stop="x") == ("stop", "[]", '["x"]')
    assert field(model, source, logit_bias={3: 1.0}) == ("logit_bias/3", None, "1.0")
    assert field(model, source, min_tokens=1) == ("min_tokens", "0", "1")
    assert field(model, source, regex="a+")[0] == "constraint"
    assert field(model, source, deterministic=True)[0] == "deterministic"

    longer = Model(
        type(model.transformer)(replace(model.spec, max_positions=99)).eval(), model.tokenizer, model.settings
    )
    longer.transformer.load_state_dict(model.transformer.state_dict())
    assert field(longer, source) == ("spec/max_positions", "64", "99")
    tuned = Model(tiny.transformer(config(), seed=5), model.tokenizer, model.settings)
    assert field(tuned, source)[0] == "model/weights"
    from cutaway.tokenizers.load import from_folder

    folder = write_folder(tmp_path / "else", config(), template="{{ messages[0]['content'] }}")
    assert field(Model(model.transformer, from_folder(folder), model.settings), source)[0] == "model/tokenizer"
    ends = replace(model.settings, eos_ids=(*model.settings.eos_ids, 9))
    assert field(Model(model.transformer, model.tokenizer, ends), source)[0] == "stop_ids"

    report = model.generate_file(source, out, **{**HOW, "temperature": 0.5}, restart=True)
    assert (report.kept, len(lines(out))) == (0, len(TEXTS))
    assert out.read_bytes() != wanted
    assert model.generate_file(source, out, **{**HOW, "temperature": 0.5}).kept == len(TEXTS)


@pytest.mark.parametrize("theirs", [b"my notes", b"my notes\n", b'{"index": 0}\n'])
def test_somebody_elses_file(model: Model, source: Path, theirs: bytes) -> None:
    out = source.with_name("out")
    out.write_bytes(theirs)
    with pytest.raises(ResumeMismatch, match="nothing says how it was made"):
        model.generate_file(source, out, **HOW)
    assert out.read_bytes() == theirs
    assert {path.name for path in out.parent.iterdir()} == {"out", source.name}


def test_damage_is_found(model: Model, source: Path) -> None:
    """Of the record, of a line: nothing is written over, and the line is named."""
    out = source.with_name("out")
    model.generate_file(source, out, **HOW)
    record, wanted = Path(f"{out}.run"), out.read_bytes()
    whole = record.read_bytes()
    for broken in (
        b"",
        b"{}",
        b"[]",
        whole[:-9],
        whole.replace(b'"source"', b'"sauce"'),
        whole.replace(b'"1"', b'"9"'),
    ):
        record.write_bytes(broken)
        with pytest.raises((FormatError, ResumeMismatch)):
            model.generate_file(source, out, **HOW)
    record.write_bytes(whole)
    split = wanted.splitlines(True)
    for place, other in (
        (2, b"\n"),
        (2, b"{}\n"),
        (2, split[3]),
        (2, split[2].replace(b'"run": "', b'"run": "0')),
        (10, split[10] + split[10]),
    ):
        out.write_bytes(b"".join([*split[:place], other, *split[place + 1 :]]))
        held = out.read_bytes()
        with pytest.raises(FormatError, match="no line that this run has written") as caught:
            model.generate_file(source, out, **HOW)
        assert str(caught.value.path).startswith(f"{out}:")
        assert out.read_bytes() == held
    out.write_bytes(wanted)
    assert model.generate_file(source, out, **HOW).kept == len(TEXTS)


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────


def started(*arguments: object, **more: Any) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, **more)


def test_killed_at_every_call(folder: Path, tmp_path: Path) -> None:
    """``kill -9`` before each call that touches the disk, and within each write: nothing is lost, none comes twice."""
    out, err = started("-m", "tests.generation.killed_batch", folder, tmp_path, cwd=ROOT).communicate()
    assert err == b"", err.decode()
    tried = json.loads(out)
    print(f"\n{tried}")
    assert tried["points"] >= 15
    assert tried["torn"] >= 4
    assert tried["partial"] >= 4
    assert tried["deaths"] >= 3


@pytest.mark.slow
def test_killed_at_any_time(folder: Path, tmp_path: Path) -> None:
    """From outside, some time after the file has grown, until the command line has come to its end."""
    source = jsonl(tmp_path / "p.jsonl", *({"prompt": "the end"[: 1 + i % 7]} for i in range(120)))
    words = ["-m", "cutaway", "run", "--prompts", source, "-m", folder, "-n", 40, "-t", 1, "--seed", 1, "--batch", 2]
    assert started(*words, "-q", "-o", tmp_path / "whole").communicate() == (b"", b"")
    wanted, out, chance, kills = (tmp_path / "whole").read_bytes(), tmp_path / "out", random.Random(0), 0
    out.touch()
    while True:
        target = out.stat().st_size + chance.randint(1, len(wanted) // 4)
        with started(*words, "-q", "-o", out) as process:
            while process.poll() is None and out.stat().st_size < target:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
        assert wanted.startswith(out.read_bytes())
        if process.returncode == 0:
            break
        kills += 1
    print(f"\nkilled {kills} times")
    assert kills >= 3
    assert out.read_bytes() == wanted


FULL = """
import resource, signal, sys, cutaway
from cutaway.errors import StorageError
model = cutaway.load(sys.argv[1])
try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
    model.generate_file(sys.argv[2], sys.argv[3], batch=1, max_tokens=5, temperature=1.0, seed=3, logprobs=3)
except StorageError as error:
    print(error.exit_code, error.path == sys.argv[3], error.got, bool(error.hint))
"""


def test_a_disk_that_is_full(model: Model, folder: Path, source: Path) -> None:
    """A typed error; whole lines stay; the same call goes on when there is room."""
    out = source.with_name("out")
    model.generate_file(source, out, batch=1, logprobs=3, **HOW)
    wanted = out.read_bytes()
    for path in (out, Path(f"{out}.run")):
        path.unlink()
    limit = len(wanted) * 3 // 4  # more than the record of the run has
    said, err = started("-c", FULL, folder, source, out, limit).communicate()
    assert (said, err) == (b"4 True File too large True\n", b"")
    held = out.read_bytes()
    assert wanted.startswith(held)
    assert held.endswith(b"\n")
    assert 0 < len(held) < len(wanted)
    model.generate_file(source, out, batch=1, logprobs=3, **HOW)
    assert out.read_bytes() == wanted


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_refuses(model: Model, source: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write, or each sync, in turn: what is there stays whole, and nothing unfinished lies about."""
    source, out = jsonl(source, *[{"prompt": "the"}] * 4), source.with_name("out")
    how = {**HOW, "max_tokens": 1, "batch": 1}
    model.generate_file(source, out, **how)
    wanted, real, errors = out.read_bytes(), getattr(os, call), []
    for when in range(1, 40):
        for path in source.parent.iterdir():
            if path != source:
                path.unlink()
        count = 0

        def refuses(*arguments: Any, when: int = when) -> Any:
            nonlocal count
            count += 1
            if count == when:
                if call == "write":
                    real(arguments[0], bytes(arguments[1])[:10])
                raise OSError(28, "No space left on device")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuses)
            try:
                model.generate_file(source, out, **how)
                break
            except StorageError as error:
                errors.append(error.got)
        held = out.read_bytes() if out.exists() else b""
        assert wanted.startswith(held)
        assert not held or held.endswith(b"\n")
        assert not list(source.parent.glob("*.lock")) + list(source.parent.glob(".*.tmp"))
        model.generate_file(source, out, **how)
        assert out.read_bytes() == wanted
    assert len(errors) >= 3
    assert set(errors) == {"No space left on device"}


# ── one at a time ────────────────────────────────────────────────────────────────────────────────────────────


def test_two_at_once(model: Model, folder: Path, source: Path) -> None:
    """The second is refused, and says who the first is; that one is not disturbed."""
    out = source.with_name("out")
    refused: list[CutawayError] = []

    def another(tally: Tally) -> None:
        if tally.tokens and not refused:
            with pytest.raises(LockedError) as caught:
                model.generate_file(source, out, **HOW)
            refused.append(caught.value)

    model.generate_file(source, out, batch=2, progress=another, **HOW)
    (error,) = refused
    assert (error.path, error.exit_code) == (str(out), 4)
    assert error.got is not None
    assert error.got.startswith(f"process {os.getpid()} on ")
    assert len(lines(out)) == len(TEXTS)
    assert not out.with_name("out.lock").exists()
    link = source.with_name("link")
    link.symlink_to(out)
    with locked(out), pytest.raises(LockedError):  # by another name
        model.generate_file(source, link, **HOW)


HOLDS = """
import sys, time
from cutaway.formats.lock import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_a_lock_whose_process_is_dead(tmp_path: Path, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken over; while it lives it is not, by the lock or, on disks without locks, by its number."""
    if not locks:

        def none(*_: Any) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(lock.fcntl, "flock", none)
    path = tmp_path / "out"
    with started("-c", HOLDS, path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(LockedError, match=f"process {process.pid} on"), locked(path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.with_name("out.lock").exists()
    with locked(path):
        assert path.with_name("out.lock").read_text().split()[0] == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_goes_while_one_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opened the file before it was removed does not take it for the lock."""
    path, real, steps = tmp_path / "out", lock._lock, []

    def slow(file: int) -> bool | None:
        if not steps:
            steps.append(1)
            path.with_name("out.lock").unlink()  # its owner is done just now
        return real(file)

    monkeypatch.setattr(lock, "_lock", slow)
    with locked(path):
        assert path.with_name("out.lock").exists()
        with pytest.raises(LockedError), locked(path):
            pass


def test_a_window_is_a_few_batches() -> None:
    """What is lost when a run is killed is bounded by it: see the docstring."""
    assert 1 <= batch_file.WINDOW <= 8
