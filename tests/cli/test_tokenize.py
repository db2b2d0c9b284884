"""``cutaway tokenize``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutaway

Call = Callable[..., Any]
TEXT = "the wörld\n🙂 the"


@pytest.fixture(params=["folder", "gguf_file"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_json_is_the_tokenizers_own_answer(call: Call, model: Path) -> None:
    tokenizer = cutaway.load(model).tokenizer
    value = call("tokenize", TEXT, "-m", model, "--json").json
    assert [t["id"] for t in value["tokens"]] == tokenizer.encode(TEXT)
    assert b"".join(bytes(t["bytes"]) for t in value["tokens"]) == TEXT.encode()
    assert set(value["tokens"][0]) == {"id", "text", "bytes", "special", "start", "end"}
    lines = call("tokenize", TEXT, "-m", model, "--jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == value["tokens"]


def test_the_table_shows_what_cannot_be_seen(call: Call, model: Path) -> None:
    done = call("tokenize", TEXT, "-m", model)
    assert done.code == 0
    assert "·the" in done.out
    assert "⏎" in done.out
    assert "<F0>" in done.out
    assert "15 characters" in done.out
    assert "place" in done.out


def test_ids_back_to_text(call: Call, model: Path) -> None:
    ids = [t["id"] for t in call("tokenize", TEXT, "-m", model, "--json").json["tokens"]]
    for words in (" ".join(map(str, ids)), ",".join(map(str, ids)), str(ids)):
        assert call("tokenize", "--decode", words, "-m", model).out == TEXT + "\n"
    assert call("tokenize", "--decode", "-", "-m", model, stdin=f"{ids}\n".encode()).out == TEXT + "\n"
    assert call("tokenize", "--decode", "0", "-m", model).out == "<|end|>\n"
    done = call("tokenize", "--decode", "1 x", "-m", model)
    assert done.code == 2
    assert call("tokenize", "--decode", "99999999", "-m", model).code == 3
    assert call("tokenize", "--decode", "1", "text", "-m", model).code == 2


def test_control_tokens_and_chat(call: Call, model: Path) -> None:
    def ids(*flags: str, text: str = "<|im_end|>") -> list[int]:
        return [t["id"] for t in call("tokenize", text, "-m", model, "--json", *flags).json["tokens"]]

    assert ids("--special") == [2]
    assert 2 not in ids()
    chat = ids("--chat", text="the")
    tokenizer = cutaway.load(model).tokenizer
    assert chat == tokenizer.chat([{"role": "user", "content": "the"}])
    assert "<|im_start|>" in call("tokenize", "the", "-m", model, "--chat").out
    assert call("tokenize", "the", "-m", model, "--chat", "--special").code == 2


def test_no_special_leaves_bos_out(call: Call, folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path / name)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    bare = call("tokenize", "the", "-m", tmp_path, "--no-special", "--json").json["tokens"]
    whole = call("tokenize", "the", "-m", tmp_path, "--json").json["tokens"]
    assert whole[-len(bare) :] == bare
    assert call("tokenize", "the", "-m", folder, "--no-special", "--json").json["tokens"] == bare


def test_edges(call: Call, model: Path, tmp_path: Path) -> None:
    assert call("tokenize", "", "-m", model).out == "0 tokens · 0 characters · 0 bytes\n"
    assert call("tokenize", "-m", model, stdin=b"the\n").out == call("tokenize", "the", "-m", model).out
    assert call("tokenize", stdin_tty=True).code == 2
    assert call("tokenize", "\udcff", "-m", model).code == 3
    done = call("tokenize", "\x1b[31m", "-m", model)
    assert "\x1b" not in done.out
    bare = tmp_path / "bare"
    bare.mkdir()
    if model.is_dir():
        for name in ("config.json", "model.safetensors"):
            shutil.copy(model / name, bare / name)
        assert call("tokenize", "x", "-m", bare).code == 3


def test_one_token_is_one(call: Call, folder: Path) -> None:
    assert "1 token · 1 character · 1 byte\n" in call("tokenize", "a", "-m", folder, "--no-special").out
    assert "2 tokens · 2 characters · 2 bytes\n" in call("tokenize", "ab", "-m", folder, "--no-special").out
