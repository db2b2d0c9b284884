"""Tokenizers from GGUF metadata, against plain readings of the algorithms and SentencePiece itself."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutaway.errors import CutawayError, LimitExceeded, TemplateError, TokenizerError
from cutaway.tokenizers import from_folder, from_gguf
from cutaway.tokenizers.rust import vocabulary_size
from tests.tokenizers import small
from tests.tokenizers.texts import random_texts


def test_same_as_tokenizer_json(tmp_path: Path):
    ours = small.byte_level()
    other = from_folder(small.folder(tmp_path))
    assert other is not None
    texts = random_texts(500, seed=2)
    assert ours.encode_batch(texts) == other.encode_batch(texts)
    assert (ours.bos_id, ours.eos_ids, ours.adds_bos) == (1, (2, 0), False)
    assert dict(ours.special) == {token: i for i, token in enumerate(small.CONTROL)}


def test_arrays_may_be_numpy():
    metadata = small.sentencepiece_metadata()
    metadata["tokenizer.ggml.scores"] = np.array(metadata["tokenizer.ggml.scores"], np.float32)
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    metadata["tokenizer.ggml.bos_token_id"] = np.uint32(1)
    assert from_gguf(metadata).encode("the cat") == small.sentencepiece().encode("the cat")


def bigrams(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's BPE as its paper says it: join the best neighbours, leftmost first, until none is a piece."""
    rows = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    ids = {token: i for i, (token, kind) in enumerate(rows) if kind == 1}
    scores = metadata["tokenizer.ggml.scores"]
    text = ("▁" if metadata["tokenizer.ggml.add_space_prefix"] and text else "") + text.replace(" ", "▁")
    parts = list(text)
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    made: list[int] = []
    for part in parts:
        made += [ids[part]] if part in ids else [5 + byte for byte in part.encode()]
    return made


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_by_definition(prefix: bool):
    metadata, ours = small.sentencepiece_metadata(prefix=prefix), small.sentencepiece(prefix)
    for text in random_texts(400, seed=4):
        assert ours.encode(text, bos=False) == bigrams(metadata, text), text


@pytest.fixture(scope="module")
def trained() -> Any:
    """A model that SentencePiece itself trained, with symbols of the user's."""
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in random_texts(400, seed=9) for line in text.split("\n") if line]),
        model_writer=out,
        model_type="bpe",
        vocab_size=2600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<sep>", "\n\n", "ab"],
        control_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def test_sentencepiece_itself(trained: Any):
    size = trained.vocab_size()

    def kind(i: int) -> int:
        marks = (trained.is_unknown(i), trained.is_control(i), trained.is_byte(i), trained.is_unused(i))
        user = trained.id_to_piece(i) in ("<sep>", "\n\n", "ab")
        return next((n for n, mark in zip((2, 3, 6, 5), marks, strict=True) if mark), 4 if user else 1)

    ours = from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [trained.id_to_piece(i) for i in range(size)],
            "tokenizer.ggml.scores": [trained.get_score(i) for i in range(size)],
            "tokenizer.ggml.token_type": [kind(i) for i in range(size)],
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    for text in random_texts(1500, seed=10):
        if any(symbol in text for symbol in ("<sep>", "\n\n", "ab", "\0")):
            continue  # after a user's symbol llama.cpp, and so these files, add a space; SentencePiece does not
        assert ours.encode(text) == trained.encode(text), text
    assert ours.encode("<sep>") == [trained.piece_to_id("<sep>")]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_the_size_that_is_told_is_the_size_that_is_found(kind: str):
    metadata = small.byte_level_metadata() if kind == "byte level" else small.sentencepiece_metadata(prefix=False)
    tokenizer = from_gguf(metadata, small.declared)
    assert tokenizer.vocab_size == vocabulary_size(tokenizer.backend, float("inf")) > 100


def test_ends_of_turn():
    metadata = small.byte_level_metadata()
    more = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 5}
    assert from_gguf(metadata | more).eos_ids == (2, 0, 5)
    metadata["tokenizer.ggml.tokens"][1:3] = ["<|return|>", "<|call|>"]
    metadata["tokenizer.ggml.tokens"][0] = "<|end|>"
    assert from_gguf(metadata).eos_ids == (2, 1)


def test_user_defined_tokens_are_found_first_and_are_no_control_tokens():
    metadata = small.sentencepiece_metadata(prefix=False)
    for key, value in (("tokens", ["\n" * 7, " " * 9, "<|tool|>"]), ("scores", [-1000.0] * 3), ("token_type", [4] * 3)):
        metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"] + value
    tokenizer = from_gguf(metadata, small.declared)
    last, text = tokenizer.vocab_size - 1, "a" + "\n" * 7 + "b" + " " * 9 + "c"
    ids = tokenizer.encode(text)
    assert {last - 2, last - 1} <= set(ids)
    assert "\n" * 7 not in tokenizer.special
    assert tokenizer.decode(ids) == text
    assert tokenizer.special["<|tool|>"] == last  # only its type says that it is not one


# -- rows G16 to G19

Change = Callable[[dict[str, Any]], Any]
KEY = "tokenizer.ggml."


def put(key: str, value: Any) -> Change:
    return lambda metadata: metadata.__setitem__(KEY + key, value)


def at(key: str, i: int, value: Any) -> Change:
    return lambda metadata: metadata[KEY + key].__setitem__(i, value)


def without(key: str) -> Change:
    return lambda metadata: metadata.pop(KEY + key)


BOTH: dict[str, tuple[str, Change]] = {
    "types shorter": ("token_type", lambda m: m[KEY + "token_type"].pop()),
    "types longer": ("token_type", lambda m: m[KEY + "token_type"].append(1)),
    "types are no array": ("token_type", put("token_type", 3)),
    "types are text": ("token_type", at("token_type", 0, "3")),
    "unknown type": ("token_type[7]", at("token_type", 7, 9)),
    "types as bytes": ("token_type", put("token_type", np.zeros(9, np.uint8))),
    "no tokens": ("tokens", without("tokens")),
    "empty tokens": ("tokens", put("tokens", [])),
    "tokens are no array": ("tokens", put("tokens", "abc")),
    "token is no text": ("tokens[3]", at("tokens", 3, 7)),
    "token twice": ("tokens[9]", lambda m: m[KEY + "tokens"].__setitem__(9, m[KEY + "tokens"][8])),
    "bos past the end": ("bos_token_id", put("bos_token_id", 10**6)),
    "bos is -1 as u32": ("bos_token_id", put("bos_token_id", 2**32 - 1)),
    "eos negative": ("eos_token_id", put("eos_token_id", -1)),
    "eos is a float": ("eos_token_id", put("eos_token_id", 1.0)),
    "pad is a flag": ("padding_token_id", put("padding_token_id", True)),
    "unk past the end": ("unknown_token_id", put("unknown_token_id", 10**6)),
    "model missing": ("model", without("model")),
    "model unknown": ("model", put("model", "rwkv")),
    "model is a number": ("model", put("model", 1)),
    "flag is a number": ("add_bos_token", put("add_bos_token", 1)),
}
BYTE_LEVEL: dict[str, tuple[str, Change]] = {
    "pre unknown": ("pre", put("pre", "no-such")),
    "pre is a number": ("pre", put("pre", 3)),
    "no merges": ("merges", without("merges")),
    "merge without space": ("merges[2]", at("merges", 2, "ab")),
    "merge of nothing": ("merges[2]", at("merges", 2, "a ")),
    "merge of three": ("merges[2]", at("merges", 2, "a b c")),
    "merge of unknown": ("merges[2]", at("merges", 2, "語 a")),
    "merge into unknown": ("merges[2]", at("merges", 2, "! Ġ")),
    "merge is no text": ("merges[2]", at("merges", 2, 4)),
    "eos rule without eos": ("eos_token_id", lambda m: (m.pop(KEY + "eos_token_id"), put("add_eos_token", True)(m))),
    "bos rule without bos": ("bos_token_id", lambda m: (m.pop(KEY + "bos_token_id"), put("add_bos_token", True)(m))),
}
SENTENCEPIECE: dict[str, tuple[str, Change]] = {
    "no scores": ("scores", without("scores")),
    "scores shorter": ("scores", lambda m: m[KEY + "scores"].pop()),
    "scores as bytes": ("scores", lambda m: put("scores", np.array(m[KEY + "scores"]).astype(np.uint8))(m)),
    "score is NaN": ("scores[300]", at("scores", 300, float("nan"))),
    "score is text": ("scores", at("scores", 300, "1")),
    "byte out of range": ("tokens[6]", at("tokens", 6, "<0xZZ>")),
    "byte negative": ("tokens[6]", at("tokens", 6, "<0x-1>")),
    "byte of any type": ("tokens[300]", at("tokens", 300, "<0x-1>")),
}


@pytest.mark.parametrize("case", [*BOTH, *BYTE_LEVEL])
def test_g16_to_g18_byte_level(case: str):
    key, change = (BOTH | BYTE_LEVEL)[case]
    metadata = small.byte_level_metadata()
    change(metadata)
    with pytest.raises(TokenizerError) as caught:
        from_gguf(metadata)
    assert caught.value.field == KEY + key


@pytest.mark.parametrize("case", [*BOTH, *SENTENCEPIECE])
def test_g16_to_g18_sentencepiece(case: str):
    key, change = (BOTH | SENTENCEPIECE)[case]
    metadata = small.sentencepiece_metadata()
    change(metadata)
    with pytest.raises(TokenizerError) as caught:
        from_gguf(metadata)
    assert caught.value.field == KEY + key


def test_g16_declared_type():
    """An array that was declared u8 comes as whole numbers when the reader gives lists."""
    with pytest.raises(TokenizerError, match=re.escape("expected float32")):
        from_gguf(small.sentencepiece_metadata(), lambda key: "arr[u8]" if key.endswith("scores") else "arr[i32]")


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_g18_too_many(key: str):
    metadata = small.byte_level_metadata() | {KEY + key: ["a"] * (1 << 22) + ["a"]}
    with pytest.raises(LimitExceeded) as caught:
        from_gguf(metadata)
    assert caught.value.field == KEY + key


def test_unknown_pre_lists_the_known_ones():
    with pytest.raises(TokenizerError) as caught:
        from_gguf(small.byte_level_metadata("no-such"))
    assert caught.value.hint is not None
    assert {"smollm", "llama-bpe", "qwen2"} <= set(caught.value.hint.split())


def test_more_tokens_than_rows():
    with pytest.raises(TokenizerError, match="embeddings"):
        from_gguf(small.byte_level_metadata(), vocab_rows=10)


def test_any_token_may_be_padding():
    """Some files pad with ``!``; it stays text."""
    bang = small.byte_level_metadata()["tokenizer.ggml.tokens"].index("!")
    tokenizer = from_gguf(small.byte_level_metadata() | {"tokenizer.ggml.padding_token_id": bang})
    assert tokenizer.pad_id == bang
    assert tokenizer.decode(tokenizer.encode("hi!")) == "hi!"


def test_empty_tokens_get_names():
    metadata = small.byte_level_metadata()
    metadata[KEY + "tokens"].append("")
    metadata[KEY + "token_type"].append(1)
    assert from_gguf(metadata).encode("hi") == small.byte_level().encode("hi")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (7, TemplateError),
        ("a" * (10 << 20), LimitExceeded),
        ("{{ ''.__class__ }}", TemplateError),
        ("{% if", TemplateError),
    ],
)
def test_g19_a_bad_template_only_breaks_chat(source: Any, error: type[CutawayError]):
    tokenizer = from_gguf(small.byte_level_metadata() | {"tokenizer.chat_template": source})
    assert tokenizer.chat_template is None
    assert tokenizer.decode(tokenizer.encode("still here")) == "still here"
    for call in (tokenizer.chat, tokenizer.render_chat):
        with pytest.raises(error) as caught:
            call([{"role": "user", "content": "x"}])
        assert caught.value.field == "tokenizer.chat_template"
