"""The command line with encoders and encoder–decoders: their own verbs, and what the others say to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cutaway
from cutaway.checkpoints.save import save_folder
from cutaway.cli import taps
from cutaway.cli.tag import painted
from cutaway.cli.text import Look, bar, width
from cutaway.spec.names import tap_names
from cutaway.tasks.labels import Span
from tests.cli.conftest import vocabulary, write_tokenizer
from tests.reference import tiny, tiny_encoders, tiny_seq2seq
from tests.tasks.small import VOCABULARY

Call = Callable[..., Any]
WORDS = list(dict.fromkeys(VOCABULARY))
labelled = tiny_encoders.labelled
BERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bare": ("Model", {}),
    "mlm": ("ForMaskedLM", {}),
    "labels": ("ForSequenceClassification", labelled("billing", "shipping", "ret\x1b[31murns")),
    "multi": (
        "ForSequenceClassification",
        labelled("a", "b", "c", "日本", "e", "f", "g", problem_type="multi_label_classification"),
    ),
    "regression": ("ForSequenceClassification", labelled("stars")),
    "tags": ("ForTokenClassification", labelled("O", "B-ORDER", "I-ORDER", "B-ITEM", "I-ITEM")),
}
SEQ2SEQ = ("t5", "bart", "marian")
LONG = "the cat " * 24  # fifty tokens, and there are 48 positions
FOR = {"bare": "embed", "mlm": "fill", "labels": "classify", "multi": "classify", "regression": "classify"}
FOR |= {"tags": "tag", "t5": "run", "bart": "run", "marian": "run"}


def _bert(kind: str, said: dict[str, Any], folder: Path) -> Path:
    sizes = {**tiny_encoders.SIZES, "vocab_size": len(WORDS), "type_vocab_size": 2}
    save_folder(tiny.transformer({"model_type": "bert", "architectures": ["Bert" + kind], **sizes, **said}), folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _seq2seq(name: str, folder: Path) -> Path:
    values, size = tiny_seq2seq.config(name), len(vocabulary())
    values["vocab_size"] = size
    if name == "marian":
        values |= {"pad_token_id": size - 1, "decoder_start_token_id": size - 1}
    save_folder(tiny_seq2seq.transformer(values), folder)
    write_tokenizer(folder, template=None)
    return folder


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a kind, made when it is first asked for."""
    root, made = tmp_path_factory.mktemp("zoo"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            made[name] = _bert(*BERTS[name], root / name) if name in BERTS else _seq2seq(name, root / name)
        return made[name]

    return get


Zoo = Callable[[str], Path]


# ── encoder–decoders ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SEQ2SEQ)
@pytest.mark.parametrize("beams", [1, 3])
def test_run_answers_a_source(call: Call, zoo: Zoo, name: str, beams: int) -> None:
    wanted = cutaway.load(zoo(name)).generate("the end", max_tokens=6, num_beams=beams)
    done = call("run", "the end", "-m", zoo(name), "-n", 6, "--num-beams", beams)
    assert (done.code, done.out, done.err) == (0, wanted.text + "\n", "")
    value = call("run", "the end", "-m", zoo(name), "-n", 6, "--num-beams", beams, "--json").json
    assert (value["tokens"], value["score"]) == (wanted.tokens, wanted.score)
    assert value["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens
    lines = call("run", "the end", "-m", zoo(name), "-n", 6, "--num-beams", beams, "--jsonl").out.splitlines()
    assert "".join(json.loads(line)["piece"] for line in lines[:-1]) == wanted.text


def test_the_length_is_the_checkpoints_unless_it_is_given(call: Call, zoo: Zoo, tmp_path: Path) -> None:
    for file in zoo("bart").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"max_length": 5, "decoder_start_token_id": 2, "num_beams": 2})
    )
    value = call("run", "the", "-m", tmp_path, "--json").json
    assert value["usage"]["completion_tokens"] == 4
    assert (value["settings"]["max_length"], value["settings"]["num_beams"]) == (5, 2)
    assert value["score"] is not None
    assert call("run", "the", "-m", tmp_path, "-n", 9, "--json").json["usage"]["completion_tokens"] > 4
    assert call("run", "the", "-m", tmp_path, "-v", "--num-beams", 1).err == "ended: length (--max-tokens 4)\n"
    # the checkpoint's own beams meet what does not go with them
    done = call("run", "the", "-m", tmp_path, "--stop", "x")
    assert (done.code, done.err.count("add --num-beams 1")) == (2, 1)
    done = call("run", "the", "-m", tmp_path, "--answers", 5, "--json")
    assert (done.code, done.error["field"], done.error["hint"]) == (2, "n", "add --num-beams 5")
    assert "--seed does nothing with beams" in call("run", "the", "-m", tmp_path, "--seed", 3).err
    assert call("run", "the", "-m", tmp_path, "--seed", 3, "-t", 1).err == ""


def test_a_source_is_not_echoed(call: Call, zoo: Zoo) -> None:
    done = call("run", "the", "-m", zoo("t5"), "-n", 3, "--echo")
    assert (done.code, done.out) == (2, "")
    assert "leave --echo out" in done.err


def test_next_is_the_answers_first_token(call: Call, zoo: Zoo) -> None:
    for name in SEQ2SEQ:
        model = cutaway.load(zoo(name))
        ids = model.encode_prompt("the")
        logits = model.logits(ids, target=[model.settings.decoder_start_id])[0, -1]
        done = call("next", "the", "-m", zoo(name), "--top", 4, "--json")
        assert [c["token"] for c in done.json["candidates"]] == logits.topk(4).indices.tolist()
        assert done.json["candidates"][0]["logit"] == pytest.approx(float(logits.max()), rel=1e-4)
    assert "the answer's first token" in call("next", "the", "-m", zoo("t5")).out
    assert call("next", "the", "-m", zoo("t5"), "--compare", "a").code == 0


# ── the wrong verb ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FOR)
@pytest.mark.parametrize("verb", ["run", "chat", "next", "score", "classify", "tag", "fill", "embed"])
def test_a_model_of_another_kind_is_refused_with_the_verb_it_is_for(call: Call, zoo: Zoo, verb: str, name: str) -> None:
    text = "the [MASK] sat"
    done = call(verb, text, "-m", zoo(name), *(("-n", 2) if verb == "run" else ()))
    if verb in (FOR[name], "embed") or (verb, FOR[name]) == ("next", "run"):
        assert done.code == 0
        return
    assert (done.code, done.out) == (3, "")
    if (verb, FOR[name]) == ("score", "run"):  # a source has no odds
        assert "add --target TEXT2" in done.err
        return
    if (verb, FOR[name]) == ("chat", "run"):  # it has no chat template
        assert "it answers a text: `cutaway run`" in done.err
        return
    lines = done.err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"error: {zoo(name)}: this model ")
    assert lines[2].endswith(f": use `cutaway {FOR[name]}`")
    assert lines[2].startswith("  do:  this is a")


def test_a_decoder_is_for_run(call: Call, folder: Path) -> None:
    for verb in ("classify", "tag", "fill"):
        done = call(verb, "the", "-m", folder, "--json")
        assert (done.code, done.error["hint"]) == (3, "this is a decoder: use `cutaway run`")
    assert call("embed", "the", "-m", folder).code == 0


@pytest.mark.parametrize("verb", ["run", "next", "score", "embed", "classify", "tag", "fill"])
def test_no_tokenizer(call: Call, zoo: Zoo, folder: Path, tmp_path: Path, verb: str) -> None:
    model = {"classify": "labels", "tag": "tags", "fill": "mlm", "embed": "bare"}.get(verb)
    source = folder if model is None else zoo(model)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    done = call(verb, "the", "-m", tmp_path)
    assert (done.code, done.out) == (3, "")
    assert "came without a tokenizer" in done.err
    assert "tokenizer.json" in done.err


@pytest.mark.parametrize("verb", ["classify", "tag", "fill"])
def test_these_have_no_default_model(call: Call, verb: str) -> None:
    done = call(verb, "the")
    assert done.code == 2
    assert "Name one with -m" in done.err
    assert "smollm2" not in call(verb, "--help").out
    assert call(verb, stdin_tty=True).code == 2


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("stdin", "texts"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb", ["a", "b"]),
        (b"a\n\n  \nb\r\n", ["a", "", "  ", "b"]),
        (b"\n\n", ["", ""]),
        ("a\x0bb\x0cc\u2028d\x85e\n".encode(), ["a\x0bb\x0cc\u2028d\x85e"]),
        ("ünï 🙂\n日本\n".encode(), ["ünï 🙂", "日本"]),
    ],
)
def test_each_line_is_a_text(call: Call, zoo: Zoo, stdin: bytes, texts: list[str]) -> None:
    for verb, model in (("embed", "bare"), ("classify", "labels"), ("tag", "tags")):
        rows = [json.loads(row) for row in call(verb, "-m", zoo(model), "--jsonl", stdin=stdin).out.split("\n")[:-1]]
        assert [row["text"] for row in rows] == texts
        assert call(verb, "-", "-m", zoo(model), "--jsonl", stdin=stdin).code == 0


def test_texts_that_cannot_be_read(call: Call, zoo: Zoo) -> None:
    for verb, model in (("embed", "bare"), ("classify", "labels"), ("tag", "tags"), ("fill", "mlm")):
        for stdin in (b"", b"\n", b"\xff"):
            assert call(verb, "-m", zoo(model), stdin=stdin).code == 3
        assert call(verb, "a\udcff", "-m", zoo(model)).code == 3
        texts = ["the [MASK]", LONG + "[MASK]"] if verb != "fill" else [LONG + "[MASK]"]
        done = call(verb, *texts, "-m", zoo(model), "-q", "--json")
        assert (done.code, done.error["code"], done.error["field"]) == (3, "context", f"text {len(texts)}")
        assert "the cat the cat" in done.error["hint"]
        done = call(verb, "", "-m", zoo(model))
        assert done.code == (3 if verb == "fill" else 0)
        assert verb == "fill" or "36m" in done.out or "█" in done.out or "empty" in done.out


COMMANDS = [
    ("embed", "bare", ["the \x1b[31mcat\n", "", "日本語" * 9, "a"]),
    ("embed", "bare", ["x" * 45]),
    ("classify", "labels", ["the \x1b[31mcat", "a" * 40]),
    ("classify", "multi", ["日本語" * 9]),
    ("classify", "regression", ["a"]),
    ("fill", "mlm", ["the [MASK] sat on the [MASK]"]),
]


@pytest.mark.parametrize("columns", [30, 40, 80, 140])
@pytest.mark.parametrize(("verb", "model", "texts"), COMMANDS)
def test_every_line_fits_and_is_harmless(
    call: Call, zoo: Zoo, verb: str, model: str, texts: list[str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = call(verb, *texts, "-m", zoo(model))
    assert done.code == 0
    assert "\x1b" not in done.out
    assert [line for line in done.out.splitlines() if width(line) > columns] == []


def test_a_pipe_gets_whole_texts(call: Call, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    text = "the cat sat on the mat " * 4 + "end"
    for verb, model in (("embed", "bare"), ("classify", "labels"), ("tag", "tags")):
        assert text in call(verb, text, "a", "-m", zoo(model), "-q").out.replace("[", "").replace("]", "")


# ── the four verbs ───────────────────────────────────────────────────────────────────────────────────────────


def test_embed(call: Call, zoo: Zoo, tmp_path: Path) -> None:
    texts = ["the cat", "a dog", "my order was late"]
    wanted = cutaway.load(zoo("bare")).embed(texts)
    value = call("embed", *texts, "-m", zoo("bare"), "--json").json
    assert torch.allclose(torch.tensor([row["vector"] for row in value["vectors"]]), wanted)
    for batch in (1, 2, 50):
        rows = call("embed", *texts, "-m", zoo("bare"), "--jsonl", "--batch", batch).out.splitlines()
        assert torch.allclose(torch.tensor([json.loads(row)["vector"] for row in rows]), wanted, atol=1e-5)
    done = call("embed", *texts, "-m", zoo("bare"))
    assert "note: this checkpoint does not say" in done.err
    assert done.out.count("1.000") == 3
    assert "32 numbers" in done.out
    assert call("embed", *texts, "-m", zoo("bare"), "--pool", "cls").err == ""
    for arguments in (("-o", tmp_path / "a.npy"), ("-o", tmp_path / "b", "--format", "npy")):
        assert call("embed", *texts, "-m", zoo("bare"), "-q", *arguments).out == ""
        found = np.load(arguments[1])
        assert (found.dtype, found.shape) == (np.float32, (3, 32))
        assert np.allclose(found, wanted.numpy())
    assert call("embed", "a", "-m", zoo("bare"), "--prompt", "query").code == 3
    # two texts of which nothing but the nearest is shown
    assert "nearest" in call("embed", *"abcdefghijkl", "-m", zoo("bare")).out


def test_embed_that_makes_no_sense(call: Call, zoo: Zoo, tmp_path: Path) -> None:
    done = call("embed", "a", "-m", zoo("bare"), "--format", "npy", stdout_tty=True)
    assert (done.code, done.out) == (2, "")
    assert "--out NAME.npy" in done.err
    assert call("embed", "a", "-m", zoo("bare"), "--format", "npy", "--json").code == 2
    assert call("embed", "a", "-m", zoo("bare"), "--batch", 0).code == 2
    assert call("embed", "a", "-m", zoo("bare"), "--pool", "most").code == 2
    done = call("embed", "a", LONG, "-m", zoo("bare"), "--batch", 1, "--json")
    assert (done.code, done.error["field"]) == (3, "text 2")


def test_classify(call: Call, zoo: Zoo) -> None:
    wanted = cutaway.load(zoo("labels")).classify(["the cat", ("the cat", "a dog")])
    for labels, more in zip(wanted, ((), ("--pair", "a dog")), strict=True):
        value = call("classify", "the cat", "-m", zoo("labels"), "--json", *more).json
        found = [(x["label"], x["score"]) for x in value["texts"][0]["labels"]]
        assert found == [(x.label, pytest.approx(x.score)) for x in labels]
        assert (value["kind"], value["texts"][0].get("pair")) == ("single", more[1] if more else None)
    lines = call("classify", "the cat", "-m", zoo("labels"), "--top", 1).out.splitlines()
    assert len(lines) == 1
    assert "█" in lines[0]
    assert call("classify", "the cat", "-m", zoo("labels"), "--top", 0).code == 2
    assert call("classify", "the cat", "-m", zoo("labels"), "--top", 99).out.count("\n") == 3


def test_classify_with_independent_labels_and_with_numbers(call: Call, zoo: Zoo) -> None:
    value = call("classify", "the cat", "-m", zoo("multi"), "--json").json
    assert value["kind"] == "multi"
    assert len(value["texts"][0]["labels"]) == 7
    assert sum(x["score"] for x in value["texts"][0]["labels"]) > 1.1
    value = call("classify", "the cat", "-m", zoo("regression"), "--json").json
    assert value["kind"] == "regression"
    out = call("classify", "the cat", "-m", zoo("regression")).out
    assert out == f"stars  {value['texts'][0]['labels'][0]['score']:.3f}\n"


def test_tag(call: Call, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "order 47 a"
    spans = cutaway.load(zoo("tags")).tag(text)
    assert spans
    value = call("tag", text, "", "-m", zoo("tags"), "--json").json
    found = value["texts"][0]["spans"]
    assert [(s["label"], s["start"], s["end"], s["text"]) for s in found] == [
        (s.label, s.start, s.end, s.text) for s in spans
    ]
    assert value["texts"][1] == {"text": "", "spans": []}
    done = call("tag", text, "", "-m", zoo("tags"))
    first = done.out.splitlines()[0]
    assert first.replace("[", "").replace("]", "") == text
    assert first.count("[") == len(spans)
    assert "(empty)\nnothing is labelled" in done.out
    coloured = call("tag", text, "-m", zoo("tags"), stdout_tty=True).out.splitlines()[0]
    assert "[3" in coloured
    assert f"[{spans[0].text}]" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert call("tag", text, "-m", zoo("tags"), stdout_tty=True).out.splitlines()[0] == first


def test_a_tagged_text_is_harmless_and_whole() -> None:
    text = "a\x1b[2Jb 4711\nc"
    spans = [Span("ORDER", 0.9, 7, 11, "4711"), Span("X", 0.9, 12, 13, "c")]
    assert text[7:11] == "4711"
    assert painted(text, spans, {}, Look()) == "a\\x1b[2Jb [4711]\n[c]"
    assert painted(text, spans, {"ORDER": "red", "X": "cyan"}, Look(colour=True)) == (
        "a\\x1b[2Jb \x1b[31m4711\x1b[0m\n\x1b[36mc\x1b[0m"
    )


def test_fill(call: Call, zoo: Zoo) -> None:
    text = "the [MASK] sat on the [MASK]"
    wanted = cutaway.load(zoo("mlm")).fill(text, top=3)
    blanks = call("fill", text, "-m", zoo("mlm"), "--top", 3, "--json").json["blanks"]
    assert [[c["id"] for c in blank] for blank in blanks] == [[c.token for c in blank] for blank in wanted]
    lines = call("fill", text, "-m", zoo("mlm"), "--top", 3, stdin=b"").out.splitlines()
    assert [line for line in lines if line.startswith("blank")] == ["blank 1", "blank 2"]
    assert call("fill", "-m", zoo("mlm"), "--top", 3, stdin=text.encode() + b"\r\n").out.splitlines() == lines
    assert len(call("fill", "a [MASK]", "-m", zoo("mlm"), "--top", 10**4).out.splitlines()) == len(WORDS)
    assert call("fill", "a [MASK]", "-m", zoo("mlm"), "--top", 0).code == 2
    done = call("fill", "no blank", "-m", zoo("mlm"))
    assert done.code == 3
    assert "put [MASK] where a word is missing" in done.err


def test_a_bar_of_anything() -> None:
    assert [bar(share, 4, Look()) for share in (float("nan"), -1, 2, float("inf"))] == ["", "", "████", "████"]


# ── show ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
@pytest.mark.parametrize("name", ["mlm", "multi", *SEQ2SEQ])
def test_show_fits(call: Call, zoo: Zoo, name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for flags in ((), ("--depth", 2), ("--taps",)):
        done = call("show", zoo(name), *flags)
        assert (done.code, done.err) == (0, "")
        wide = [line for line in done.out.splitlines() if width(line) > columns]
        assert not [line for line in wide if columns >= 60 or line[:1] in "├└│mde"], wide
    model = cutaway.load(zoo(name))
    names = {row["name"] for row in call("show", zoo(name), "--taps", "--json").json["taps"]}
    assert names == set(tap_names(model.spec))
    shown = {line.split("  ")[0] for line in done.out.splitlines()}
    assert "logits" in shown
    at = "cross" if name in SEQ2SEQ else "attn"
    stack = "decoder" if name in SEQ2SEQ else "encoder"
    assert {f"{stack}.layers.{{i}}.{at}.{x}" for x in ("weights", "head_out", "q")} <= shown  # names are whole
    if columns >= 80:
        assert "who reads whom" in done.out
        assert "…" not in done.out


@pytest.mark.parametrize("name", [*BERTS, *SEQ2SEQ])
def test_every_quantity_has_a_meaning_and_its_own_shape(call: Call, zoo: Zoo, name: str) -> None:
    model = cutaway.load(zoo(name))
    rows = {row["name"]: row for row in call("show", zoo(name), "--taps", "--json").json["taps"]}
    seen = model.trace([5, 6, 7], "*")
    assert set(seen) == set(rows)
    for key, row in rows.items():
        assert 0 < len(row["meaning"]) <= 18, key
        fixed = [(a, b) for a, b in zip(seen[key].shape, row["shape"], strict=True) if b is not None]
        assert all(a == b for a, b in fixed), key
    logits = {"labels": "scores of labels", "tags": "scores of labels", "mlm": "scores of tokens"}
    if "logits" in rows:
        assert rows["logits"]["meaning"] == logits.get(name, rows["logits"]["meaning"])
        assert ("label" in rows["logits"]["axes"]) == (FOR[name] in ("classify", "tag"))
    assert name not in SEQ2SEQ or rows["logits"]["meaning"] == "next-token scores"


@pytest.mark.parametrize("name", sorted({*tiny_encoders.CASES, *tiny_seq2seq.CASES}))
def test_every_case_has_words_for_all_it_computes(name: str) -> None:
    case = tiny_encoders.CASES.get(name) or tiny_seq2seq.CASES[name]
    with torch.device("meta"):
        spec = tiny.spec_of(case)
    for key in tap_names(spec):
        assert 0 < len(taps.meaning(key, spec)) <= 18, key


def test_show_says_what_there_is(call: Call, zoo: Zoo) -> None:
    out = call("show", zoo("labels"), "--depth", 1).out
    assert "3 labels: billing" in out
    assert "ret\\x1b[31murns" in out
    assert "and 1 more" in call("show", zoo("multi"), "--depth", 1).out
    assert "1 number: stars" in call("show", zoo("regression"), "--depth", 1).out
    value = call("show", zoo("tags"), "--json").json
    assert (value["stacks"], value["label_kind"], len(value["labels"])) == ({"encoder": 3}, "single", 5)
    out = call("show", zoo("bart"), "--depth", 1).out
    assert "source  the same tokens, 48 learned positions" in out
    assert out.index("decoder layers") < out.index("before and after the layers") < out.index("  source")
    value = call("show", zoo("bart"), "--json").json
    assert (value["stacks"], value["family"]) == ({"encoder": 2, "decoder": 3}, "bart")
    assert value["cache_bytes_per_source_token_fp32"] == 3 * 2 * 32 * 4
    assert (value["not_used"], value["missing"]) == ([], [])
    assert "i = 0–1 in the encoder, 0–2 in the decoder" in call("show", zoo("bart"), "--taps").out
    assert call("show", zoo("bart"), "encoder.layers.1.attn.q", "--json").json["shape"] == [32, 32]
    assert call("show", zoo("mlm"), "--tokenizer", "--json").json["kind"] == "WordPiece"
