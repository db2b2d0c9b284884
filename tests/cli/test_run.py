"""``cutaway run``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutaway

Call = Callable[..., Any]
KEYS = {"text", "tokens", "finish_reason", "score", "usage", "logprobs", "timing", "model", "settings"}


def test_the_text_goes_to_stdout_and_nothing_else(call: Call, folder: Path) -> None:
    wanted = cutaway.load(folder).generate("the end", max_tokens=12, temperature=0).text
    done = call("run", "the end", "-m", folder, "-n", 12, "-t", 0)
    assert (done.code, done.out, done.err) == (0, wanted + "\n", "")
    assert call("run", "the end", "-m", folder, "-n", 12, "-t", 0, "--echo").out == f"the end{wanted}\n"


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_the_prompt_may_come_from_stdin(call: Call, folder: Path, arguments: tuple[str, ...]) -> None:
    wanted = call("run", "thé\n end", "-m", folder, "-n", 5, "-t", 0).out
    assert call("run", *arguments, "-m", folder, "-n", 5, "-t", 0, stdin="thé\n end\r\n".encode()).out == wanted


def test_without_a_prompt_on_a_terminal_it_points_to_chat(call: Call) -> None:
    done = call("run", stdin_tty=True)
    assert done.code == 2
    assert "cutaway chat" in done.err


@pytest.mark.parametrize("stdin", [b"", b"\n"])
def test_an_empty_pipe_is_bad_input(call: Call, folder: Path, stdin: bytes) -> None:
    done = call("run", "-m", folder, stdin=stdin)
    assert (done.code, done.out) == (3, "")
    assert "nothing came on standard input" in done.err


def test_an_empty_prompt_begins_with_bos(call: Call, folder: Path) -> None:
    assert call("run", "", "-m", folder, "-n", 3, "--json").json["usage"]["prompt_tokens"] == 1


def test_stdin_that_is_no_text(call: Call, folder: Path) -> None:
    done = call("run", "-m", folder, "--json", stdin=b"ab\xff")
    assert done.code == 3
    assert done.error["code"] == "tokenizer"


def test_half_a_surrogate_in_an_argument(call: Call, folder: Path) -> None:
    assert call("run", "a\udcff", "-m", folder).code == 3


def test_json_has_everything(call: Call, folder: Path) -> None:
    done = call("run", "the", "-m", folder, "-n", 6, "--json", "--logprobs", 2, "--seed", 5, "-t", 1, "--top-k", 9)
    assert (done.code, done.err) == (0, "")
    value = done.json
    assert set(value) == KEYS
    assert value["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert value["finish_reason"] == "length"
    assert len(value["tokens"]) == len(value["logprobs"]) == 6
    assert len(value["logprobs"][0]["top"]) == 2
    assert set(value["logprobs"][0]) == {"token", "text", "bytes", "logprob", "top"}
    assert value["settings"]["seed"] == 5
    assert value["settings"]["top_k"] == 9
    assert value["timing"]["total_s"] >= 0
    assert value["model"]["family"] == "llama"
    again = call("run", "the", "-m", folder, "-n", 6, "--json", "--seed", 5, "-t", 1, "--top-k", 9).json
    assert again["tokens"] == value["tokens"]
    assert again["logprobs"] is None


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("top", [0, 1])
def test_s12_echo_has_the_prompts_logprobs(call: Call, folder: Path, n: int, top: int) -> None:
    """Case S12: an entry for each token of prompt and answer, the first one null."""
    words = ("run", "the end", "-m", folder, "-n", n, "-t", 0, "--echo", "--logprobs", top)
    done = call(*words, "--json")
    value, count = done.json, len(cutaway.load(folder).encode_prompt("the end"))
    entries = value["prompt_logprobs"] + value["logprobs"]
    assert len(entries) == count + n
    assert entries[0] is None
    wanted = cutaway.load(folder).score("the end", top=top)
    assert [entry["logprob"] for entry in entries[1:count]] == pytest.approx(wanted.logprobs[1:], abs=1e-4)
    assert {len(entry["top"]) for entry in entries[1:]} == {top}
    assert b"".join(bytes(entry["bytes"]) for entry in entries[1:count]).decode() in "the end"
    table = call(*words).err.splitlines()
    assert len(table) == count + n
    assert "–" in table[0]


def test_what_a_token_was_chosen_from(call: Call, folder: Path) -> None:
    """At a temperature of 2, the model's own logits halved; of three likeliest, three."""
    words = ("run", "the end", "-m", folder, "-n", 3, "-t", 2, "--top-k", 3, "--seed", 1, "--processed-logprobs", 5)
    value = call(*words, "--logprobs", 3, "--json").json
    for own, chosen in zip(value["logprobs"], value["processed_logprobs"], strict=True):
        assert (own["token"], own["text"]) == (chosen["token"], chosen["text"])
        scores = {best["token"]: math.exp(best["logprob"] / 2) for best in own["top"]}
        wanted = {token: math.log(score / sum(scores.values())) for token, score in scores.items()}
        assert {best["token"]: best["logprob"] for best in chosen["top"]} == pytest.approx(wanted, abs=1e-4)
    assert call(*words, "--json").json["logprobs"] is None
    alone, both = call(*words).err.splitlines(), call(*words, "--logprobs", 3).err.splitlines()
    assert len(alone) == 3
    assert both[3:] == ["processed:", *alone]
    assert len(call(*words, "--answers", 2).err.splitlines()) == 2 * (1 + 3)
    assert call("run", "the", "-m", folder, "--processed-logprobs", -1).code == 2


def test_v04_how_long_an_answer_may_be(call: Call, folder: Path) -> None:
    """Case V04: 0 and 1 are lengths, −1 and words are not; what is cut says so."""
    for n in (0, 1):
        value = call("run", "the", "-m", folder, "-n", n, "-t", 0, "--json").json
        assert (len(value["tokens"]), value["finish_reason"]) == (n, "length")
    for n in (-1, "all", 1.5, ""):
        done = call("run", "the", "-m", folder, "-n", n)
        assert (done.code, done.out) == (2, "")


def test_v05_a_prompt_counts_once(call: Call, folder: Path) -> None:
    """Case V05: of three answers together, and of each."""
    value = call("run", "the", "-m", folder, "-n", 4, "-t", 1, "--seed", 1, "--answers", 3, "--json").json
    written = sum(len(choice["tokens"]) for choice in value["choices"])
    assert value["usage"] == {"prompt_tokens": 2, "completion_tokens": written, "total_tokens": 2 + written}
    assert [choice["usage"]["prompt_tokens"] for choice in value["choices"]] == [2, 2, 2]


def test_v06_bytes_of_a_token(call: Call, folder: Path) -> None:
    """Case V06: the bytes of each token, alternatives too; joined they are the text, with no U+FFFD."""
    words = ("run", "the", "-m", folder, "--choice", "é🙂", "-t", 0, "--logprobs", 3, "--json")
    value = call(*words).json
    assert value["text"] == "é🙂"
    assert b"".join(bytes(entry["bytes"]) for entry in value["logprobs"]) == "é🙂".encode()
    assert "\ufffd" in "".join(entry["text"] for entry in value["logprobs"])
    assert all(len(best["bytes"]) for entry in value["logprobs"] for best in entry["top"])


def test_a_seed_that_was_drawn_is_told_and_gives_the_same_again(call: Call, folder: Path) -> None:
    first = call("run", "a", "-m", folder, "-n", 8, "-t", 1, "--json").json
    second = call("run", "a", "-m", folder, "-n", 8, "-t", 1, "--json", "--seed", first["settings"]["seed"]).json
    assert second["text"] == first["text"]


def test_jsonl_streams_pieces_and_ends_with_the_whole(call: Call, folder: Path) -> None:
    lines = [json.loads(line) for line in call("run", "the", "-m", folder, "-n", 6, "--jsonl").out.splitlines()]
    assert set(lines[-1]) == KEYS
    assert "".join(line["piece"] for line in lines[:-1]) == lines[-1]["text"]


def test_out_is_a_whole_file_and_stdout_stays_empty(call: Call, folder: Path, tmp_path: Path) -> None:
    wanted = call("run", "the", "-m", folder, "-n", 6, "-t", 0).out
    target = tmp_path / "answer.txt"
    done = call("run", "the", "-m", folder, "-n", 6, "-t", 0, "-o", target)
    assert (done.code, done.out) == (0, "")
    assert target.read_text() == wanted
    assert list(tmp_path.glob(".*")) == []
    done = call("run", "the", "-m", folder, "-n", 6, "-o", tmp_path / "none" / "x")
    assert done.code == 4


def test_stop_logprobs_and_stats_on_stderr(call: Call, folder: Path) -> None:
    whole = call("run", "the", "-m", folder, "-n", 12, "-t", 0).out.rstrip("\n")
    stop = whole[4:6]
    done = call("run", "the", "-m", folder, "-n", 12, "-t", 0, "--stop", stop, "--stats", "-v", "--logprobs", 1)
    assert done.out == whole[: whole.index(stop)] + "\n"
    assert "ended: an end token, or a stop text" in done.err
    assert "prefill 2 tokens" in done.err
    assert "decode" in done.err
    assert len(done.err.splitlines()) > 3


def test_the_end_of_a_learned_table_is_said(call: Call, base_folder: Path) -> None:
    done = call("run", "x" * 60, "-m", base_folder, "-n", 50, "-v", "--json")
    assert done.json["finish_reason"] == "length"
    assert "no position after the 64th" in done.err
    done = call("run", "x" * 70, "-m", base_folder, "--json")
    assert (done.code, done.error["code"]) == (3, "context")


def test_control_tokens_in_a_prompt_are_text_unless_asked(call: Call, folder: Path) -> None:
    plain = call("run", "<|im_end|>", "-m", folder, "-n", 1, "--json").json
    special = call("run", "<|im_end|>", "-m", folder, "-n", 1, "--json", "--special").json
    assert plain["usage"]["prompt_tokens"] > 5
    assert special["usage"]["prompt_tokens"] == 1


def test_a_terminal_gets_no_control_characters(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutaway.generation.streamed import Stream

    monkeypatch.setattr(Stream, "__next__", iter(["a\x1b[31mb\n\tc\x9b"]).__next__)
    assert call("run", "x", "-m", folder, stdout_tty=True).out == "a\\x1b[31mb\n\tc\\x9b\n"
    monkeypatch.setattr(Stream, "__next__", iter(["a\x1b[31mb"]).__next__)
    assert call("run", "x", "-m", folder).out == "a\x1b[31mb\n"


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("-t", "-1"), 2),
        (("--top-p", "1.5"), 2),
        (("--stop", ""), 2),
        (("--dtype", "int4"), 2),
        (("--device", "gpu"), 2),
        (("--device", "cuda:77"), 2),
        (("--threads", "0"), 2),
        (("-n", "some"), 2),
        (("extra", "words"), 2),
    ],
)
def test_flags_that_make_no_sense(call: Call, folder: Path, flags: tuple[str, ...], code: int) -> None:
    done = call("run", "hi", "-m", folder, *flags)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")


def test_models_that_are_not_there(call: Call, tmp_path: Path) -> None:
    assert call("run", "hi", "-m", tmp_path / "none.gguf").code == 3
    assert call("run", "hi", "-m", "smollm2", "--offline").code == 5
    assert call("run", "hi", "-m", "smolm", "--offline").code in (3, 5)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\3\0\0\0")
    done = call("run", "hi", "-m", tmp_path / "bad.gguf", "--json")
    assert (done.code, done.error["code"]) == (3, "truncated")
    assert done.error["path"] == str(tmp_path / "bad.gguf")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert call("run", "hi", "-m", tmp_path / "pytorch_model.bin").code == 3


def test_a_bug_says_how_to_report_it(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(sys.modules["cutaway.store"], "load", broken)
    done = call("run", "hi", "-m", folder)
    assert done.code == 70
    assert "AttributeError: no such thing" in done.err
    assert "--debug" in done.err
    assert "Traceback" not in done.err


def test_ctrl_c_here(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutaway.generation.streamed import Stream

    def interrupted(self: Stream) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "__next__", interrupted)
    done = call("run", "hi", "-m", folder, stdout_tty=True)
    assert (done.code, done.out) == (130, "\n")


@pytest.mark.parametrize("verb", ["run", "chat"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--seed", 3, "-t", 0), "--seed does nothing"),
        (("--seed", 3, "--top-k", 4, "-t", 0), "--seed, --top-k do nothing"),
        (("--top-p", 0.5, "-t", 0), "--top-p does nothing"),
        (("--seed", 3), "--seed does nothing"),  # the tiny model's own temperature is 0
        (("--seed", 3, "-t", 0.5), ""),
        (("-t", 0), ""),
        (("--seed", 3, "-t", 0, "-q"), ""),
        (("--seed", 3, "-t", 0, "--json"), ""),
    ],
)
def test_options_without_effect_are_named(
    call: Call, folder: Path, verb: str, flags: tuple[object, ...], said: str
) -> None:
    done = call(verb, "the", "-m", folder, "-n", 2, *flags)
    assert done.code == 0
    assert len(done.err.splitlines()) == bool(said)
    assert said in done.err


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_an_answer_that_was_cut_is_marked_on_a_terminal(call: Call, folder: Path, tmp_path: Path, verb: str) -> None:
    words = (verb, "the", "-m", folder, "-t", 0)
    assert call(*words, "-n", 3, stdout_tty=True).err == "(cut after 3 tokens: -n takes a larger limit)\n"
    assert call(*words, "-n", 1, stdout_tty=True).err == "(cut after 1 token: -n takes a larger limit)\n"
    assert call(*words, "-n", 3, "-v", stdout_tty=True).err == "ended: length (--max-tokens 3)\n"
    for more in (("-q",), ("--json",), ("-o", tmp_path / "x")):
        assert call(*words, "-n", 3, *more, stdout_tty=True).err == ""
    assert call(*words, "-n", 3).err == ""
    ended = call("run", "the", "-m", folder, "-t", 0, "-n", 9, "--stop", "".join(map(chr, range(32, 33))))
    assert "cut" not in ended.err


def test_the_end_of_a_learned_table_is_marked_too(call: Call, base_folder: Path) -> None:
    done = call("run", "x" * 60, "-m", base_folder, "-n", 50, "-t", 0, stdout_tty=True)
    assert "the model has no further position" in done.err


def test_one_token_is_one(call: Call, folder: Path) -> None:
    done = call("run", "a", "-m", folder, "-n", 1, "-t", 0, "--stats")
    assert "prefill 1 token," in done.err
    assert "decode 1 token," in done.err


def test_beams(call: Call, folder: Path) -> None:
    model = cutaway.load(folder)
    wanted = model.generate("the end", max_tokens=6, num_beams=3, n=2, length_penalty=0.5, early_stopping=True)
    words = ("run", "the end", "-m", folder, "-n", 6, "--num-beams", 3, "--length-penalty", 0.5)
    words += ("--early-stopping", "true")
    assert call(*words).out == wanted[0].text + "\n"
    assert call(*words, "--echo").out == f"the end{wanted[0].text}\n"
    value = call(*words, "--n-best", 2, "--json", "--echo").json
    assert set(value) == {*KEYS, "choices"}
    assert [(c["tokens"], c["score"]) for c in value["choices"]] == [(w.tokens, w.score) for w in wanted]
    assert [c["text"] for c in value["choices"]] == ["the end" + w.text for w in wanted]
    assert (value["text"], value["score"]) == (value["choices"][0]["text"], wanted[0].score)
    assert (value["settings"]["num_beams"], value["settings"]["early_stopping"]) == (3, True)
    assert value["timing"]["first_token_s"] is None  # they come together, at the end
    assert value["timing"]["prefill_tokens_per_s"] > 0
    assert value["timing"]["decode_tokens_per_s"] > 0
    out = call(*words, "--answers", 2).out
    heads = [f"[{i}]  score {w.score:.4f}\n" for i, w in enumerate(wanted, 1)]
    assert out == f"{heads[0]}{wanted[0].text}\n\n{heads[1]}{wanted[1].text}\n"


def test_several_answers_are_drawn(call: Call, folder: Path, tmp_path: Path) -> None:
    wanted = cutaway.load(folder).generate("the", max_tokens=5, temperature=1, seed=3, n=3)
    words = ("run", "the", "-m", folder, "-n", 5, "-t", 1, "--seed", 3, "--answers", 3)
    value = call(*words, "--json").json
    assert [c["tokens"] for c in value["choices"]] == [w.tokens for w in wanted]
    assert value["score"] is None
    lines = [json.loads(line) for line in call(*words, "--jsonl").out.splitlines()]
    assert lines[:3] == [{"choice": i, "piece": w.text} for i, w in enumerate(wanted)]
    assert len(lines[3]["choices"]) == 3
    out = call(*words).out
    assert out == "\n".join(f"[{i}]\n{w.text}\n" for i, w in enumerate(wanted, 1))
    assert call(*words, "-o", tmp_path / "x").out == ""
    assert (tmp_path / "x").read_text() == out
    assert call(*words, "--jsonl", "-o", tmp_path / "y").out == ""
    assert len(json.loads((tmp_path / "y").read_text())["choices"]) == 3
    done = call(*words, "--stats", "--logprobs", 1)
    assert done.err.count("[2] 5 tokens") == 1
    assert "decode 15 tokens" in done.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-beams", 2, "--seed", 3), "--seed does nothing with beams"),
        (("--num-beams", 2, "--top-k", 3, "--top-p", 0.5), "--top-k, --top-p do nothing with beams"),
        (("--length-penalty", 2), "--length-penalty does nothing without beams"),
        (("--early-stopping", "false"), "--early-stopping does nothing without beams"),
        (("--answers", 2), "all answers are alike"),
        (("--answers", 2, "-t", 1), ""),
        (("--num-beams", 2, "--answers", 2, "--length-penalty", 2, "--early-stopping", "never"), ""),
    ],
)
def test_what_does_nothing_to_a_search_is_named(call: Call, folder: Path, flags: tuple[object, ...], said: str) -> None:
    done = call("run", "the", "-m", folder, "-n", 2, *flags)
    assert done.code == 0
    assert len(done.err.splitlines()) == bool(said)
    assert said in done.err


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-beams", 2, "-t", 0.5),
        ("--num-beams", 2, "--stop", "x"),
        ("--num-beams", 2, "--answers", 3),
        ("--early-stopping", "maybe"),
    ],
)
def test_what_does_not_go_together_is_refused_before_loading(call: Call, flags: tuple[object, ...]) -> None:
    done = call("run", "the", "-m", "/no/such/model", *flags)
    assert (done.code, done.out) == (2, "")
    assert "such" not in done.err


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_rules(call: Call, folder: Path, verb: str) -> None:
    value = call(
        verb, "the", "-m", folder, "-n", 12, "-t", 0, "--json",
        "--no-repeat-ngram", 1, "--min-tokens", 12, "--bad-words", "e", "--bad-words", "the",
    ).json  # fmt: skip
    assert len(set(value["tokens"])) == 12
    assert "e" not in value["text"]
    rules = value["settings"]["rules"]
    assert (rules["no_repeat_ngram_size"], rules["min_tokens"]) == (1, 12)
    assert value["settings"]["bad_words"] == ["e", "the"]


def test_the_length_without_n_is_256(call: Call, folder: Path) -> None:
    value = call("run", "the", "-m", folder, "--json", "--stop", "e", "-t", 0).json
    assert value["settings"]["max_tokens"] == 256
    assert "the checkpoint's own, or else 256" in " ".join(call("run", "--help").out.split())


def test_a_search_says_so_on_a_terminal_and_leaves_nothing(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", "the", "-m", folder, "-n", 2, "--num-beams", 2)
    assert call(*words).err == ""
    monkeypatch.setattr("cutaway.cli.run.load_model", lambda settings: cutaway.load(folder))  # without its own bar
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    done = call(*words, "-v")
    assert "searching with 2 beams" in done.err
    assert done.err.split("\r\x1b[K")[1] == "ended: length (--max-tokens 2)\n"
    assert "\x1b" not in call(*words, "-q").err
    monkeypatch.setenv("TERM", "dumb")
    assert "searching" not in call(*words).err


def test_several_answers_on_a_terminal_are_harmless(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from cutaway.model import Model

    real = Model.generate

    def odd(self: Model, *args: Any, **options: Any) -> Any:
        return [replace(found, text="a\x1b[31mb") for found in real(self, *args, **options)]

    monkeypatch.setattr(Model, "generate", odd)
    out = call("run", "x", "-m", folder, "-n", 2, "--num-beams", 2, "--answers", 2, stdout_tty=True).out
    assert out.count("a\\x1b[31mb\n") == 2
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in call("run", "x", "-m", folder, "-n", 2, "-t", 1, "--answers", 2, stdout_tty=True).out


def test_an_answer_with_a_form(call: Call, folder: Path, tmp_path: Path) -> None:
    run = ("run", "the", "-m", folder, "-n", 40, "-t", 1, "--seed", 3)
    assert call(*run, "--choice", "yes", "--choice", "no").out in ("yes\n", "no\n")
    assert call(*run, "--regex", "[ab]{2}!").out in ("aa!\n", "ab!\n", "ba!\n", "bb!\n")
    (tmp_path / "s.json").write_text('{"type": "boolean"}')
    assert isinstance(json.loads(call(*run, "--schema", tmp_path / "s.json").out), bool)
    (tmp_path / "g.lark").write_text('start: "a" "b"?')
    done = call(*run, "--grammar", tmp_path / "g.lark", "--json")
    assert done.json["text"] in ("a", "ab")
    assert done.json["settings"]["constraint"]["kind"] == "grammar"


def test_a_form_that_makes_no_sense(call: Call, folder: Path, tmp_path: Path) -> None:
    run = ("run", "the", "-m", folder)
    assert call(*run, "--regex", "a", "--choice", "b").code == 2
    assert call(*run, "--regex", "a", "--num-beams", 2).code == 2
    assert call(*run, "--schema", tmp_path / "missing").code == 4  # as any file that is not there
    (tmp_path / "bad").write_bytes(b"\xff")
    assert call(*run, "--grammar", tmp_path / "bad").code == 3
    done = call(*run, "--regex", "(a")
    assert done.code == 2
    assert "regex" in done.err
