"""A tokenizer as GGUF key/values: the same ids afterwards, or an error that names what cannot be said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenizers
from cutaway.errors import TokenizerError
from cutaway.tokenizers import Tokenizer, from_folder, from_gguf
from cutaway.tokenizers.gguf_write import gguf_vocabulary
from cutaway.tokenizers.merges import merges_from_scores, scores_from_merges
from cutaway.tokenizers.pretokenizers import _RULES, pre_tokenizer_name, pre_tokenizer_named
from cutaway.tokenizers.rust import components
from tests.tokenizers import small
from tests.tokenizers.texts import random_texts
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

KEY = "tokenizer.ggml."


def again(tokenizer: Tokenizer, rows: int | None = None, **options: Any) -> Tokenizer:
    rows = tokenizer.vocab_size if rows is None else rows
    found = gguf_vocabulary(tokenizer, rows, **options)
    return from_gguf({key: value for key, (_, value) in found.items()}, lambda key: found[key][0], vocab_rows=rows)


def same(one: Tokenizer, two: Tokenizer, n: int = 300) -> None:
    texts = random_texts(n, seed=6)
    for special in (False, True):
        assert one.encode_batch(texts, special=special) == two.encode_batch(texts, special=special)
    rows = one.encode_batch(texts)
    assert [one.decode(row) for row in rows] == [two.decode(row) for row in rows]
    assert (one.bos_id, one.eos_ids[:1], one.pad_id, one.adds_bos) == (
        two.bos_id,
        two.eos_ids[:1],
        two.pad_id,
        two.adds_bos,
    )
    assert dict(one.special) == dict(two.special)


@pytest.mark.parametrize("kind", ["bytes", "prefixed", "plain"])
def test_from_gguf_and_back(kind: str) -> None:
    tokenizer = small.byte_level() if kind == "bytes" else small.sentencepiece(kind == "prefixed")
    same(tokenizer, again(tokenizer))
    same(tokenizer, again(tokenizer, tokenizer.vocab_size + 5))


def test_scores_and_merges_are_kept() -> None:
    metadata = small.sentencepiece_metadata()
    found = gguf_vocabulary(small.sentencepiece(), len(metadata[KEY + "tokens"]))
    for key in ("tokens", "token_type"):
        assert found[KEY + key][1] == metadata[KEY + key]
    pieces = [i for i, kind in enumerate(metadata[KEY + "token_type"]) if kind == 1]
    merged = {left + right for left, right in merges_from_scores(*_pieces(metadata))}
    order = [i for i in pieces if metadata[KEY + "tokens"][i] in merged]
    scores = found[KEY + "scores"][1]
    assert sorted(order, key=lambda i: -scores[i]) == sorted(order, key=lambda i: -metadata[KEY + "scores"][i])


def _pieces(metadata: dict[str, Any]) -> tuple[dict[str, int], list[float]]:
    rows = zip(metadata[KEY + "tokens"], metadata[KEY + "token_type"], strict=True)
    return {token: i for i, (token, kind) in enumerate(rows) if kind == 1}, metadata[KEY + "scores"]


def test_scores_that_are_alike() -> None:
    """Pieces of one score have their merges mixed; the scores that come back give the same list."""
    ids = {piece: i for i, piece in enumerate(["a", "b", "ab", "ba", "aba", "bab", "abab"])}
    scores = [0.0, 0.0, -1.0, -1.0, -2.0, -2.0, -2.0]
    merges = merges_from_scores(ids, scores)
    assert merges_from_scores(ids, scores_from_merges(ids, merges, len(ids))) == merges


# ---- from tokenizer.json ------------------------------------------------------------------------------------


def json_tokenizer(root: Path, change: Callable[[Any], None] = lambda backend: None, **config: Any) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(small.byte_level_json())
    change(backend)
    made = from_folder(small.folder(root, backend.to_str(), tokenizer_config={"eos_token": "<|im_end|>", **config}))
    assert made is not None
    return made


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(tokenizers.Regex(pattern), behavior, invert)


def piped(*steps: Any, normalizer: Any = None, whole: bool = False) -> Callable[[Any], None]:
    def change(backend: Any) -> None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps]) if len(steps) > 1 else steps[0]
        if normalizer is not None:
            backend.normalizer = normalizer
        backend.model.ignore_merges = whole

    return change


BYTES, BYTES_ALONE = pre_tokenizers.ByteLevel(False), pre_tokenizers.ByteLevel(False, use_regex=False)
LLAMA3, QWEN2 = (pre_tokenizer_named(name).patterns[0] for name in ("llama3", "qwen2"))
PIPELINES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "gpt-2": ("gpt-2", piped(BYTES)),
    "digits one by one": ("smollm", piped(pre_tokenizers.Digits(individual_digits=True), BYTES)),
    "llama 3": ("llama3", piped(split(LLAMA3), BYTES_ALONE, whole=True)),
    "the same with merging": ("dbrx", piped(split(LLAMA3), BYTES_ALONE)),
    "cut out what does not match": ("dbrx", piped(split(LLAMA3, "removed", True), BYTES_ALONE)),
    "qwen 2": ("qwen2", piped(split(QWEN2), BYTES_ALONE, normalizer=normalizers.NFC())),
    "qwen's without NFC": ("deepseek-r1-qwen", piped(split(QWEN2), BYTES_ALONE)),
    "gpt-2 with NFC": ("mpt", piped(BYTES, normalizer=normalizers.NFC())),
}


@pytest.mark.parametrize("case", PIPELINES)
def test_the_right_name(case: str, tmp_path: Path) -> None:
    name, change = PIPELINES[case]
    tokenizer = json_tokenizer(tmp_path, change)
    assert gguf_vocabulary(tokenizer, 600)[KEY + "pre"] == ("str", name)
    same(tokenizer, again(tokenizer))


@pytest.mark.parametrize("names", _RULES)
def test_every_name_of_the_table(names: str) -> None:
    """A pipeline built by a name gets that name, or another of the same meaning."""
    rule = pre_tokenizer_named(names.split()[0])
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = rule.build()
    if rule.nfc:
        backend.normalizer = rule.normalizer()
    tree = components(backend)
    found = pre_tokenizer_named(pre_tokenizer_name(tree["normalizer"], tree["pre_tokenizer"], whole=rule.whole))
    assert (found.patterns, found.whole, found.nfc) == (rule.patterns, rule.whole, rule.nfc)


def odd(**options: bool) -> Callable[[Any], None]:
    return lambda backend: backend.add_tokens([AddedToken("<x>", **options)])


def suffixed(backend: Any) -> None:
    backend.model.end_of_word_suffix = "</w>"


def word_pieces(root: Path) -> Tokenizer:
    made = from_folder(small.folder(root, small.word_piece()))
    assert made is not None
    return made


REFUSED: dict[str, tuple[str, Callable[[Path], Tokenizer]]] = {
    "word pieces": ("/model/type", word_pieces),
    "a suffix": ("/model/end_of_word_suffix", lambda root: json_tokenizer(root, suffixed)),
    "another pattern": ("/pre_tokenizer", lambda root: json_tokenizer(root, piped(split(r"\w+|\W+"), BYTES_ALONE))),
    "a space in front": ("/pre_tokenizer", lambda root: json_tokenizer(root, piped(pre_tokenizers.ByteLevel(True)))),
    "another normalizer": (
        "/pre_tokenizer",
        lambda root: json_tokenizer(root, piped(BYTES, normalizer=normalizers.Lowercase())),
    ),
    "parts removed": (
        "/pre_tokenizer",
        lambda root: json_tokenizer(root, piped(split("x", "removed"), BYTES)),
    ),
    "a symbol that eats spaces": ("'so <x>it is<x> <x>'", lambda root: json_tokenizer(root, odd(lstrip=True))),
    "a symbol between words alone": ("'so <x>it is<x> <x>'", lambda root: json_tokenizer(root, odd(single_word=True))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    field, make = REFUSED[case]
    tokenizer = make(tmp_path)
    with pytest.raises(TokenizerError) as caught:
        gguf_vocabulary(tokenizer, tokenizer.vocab_size)
    assert caught.value.field == field


def test_merges_that_are_not_of_scores(tmp_path: Path) -> None:
    """A SentencePiece-like file whose list of merges lacks a way of making a piece."""
    backend = tokenizers.Tokenizer.from_str(small.sentencepiece().backend.to_str())
    tree = small.tree_of(backend.to_str())
    made: dict[str, list[int]] = {}
    for i, (left, right) in enumerate(tree["model"]["merges"]):
        made.setdefault(left + right, []).append(i)
    twice = next(places for places in made.values() if len(places) > 1)
    del tree["model"]["merges"][twice[0]]
    tokenizer = from_folder(small.folder(tmp_path, tree))
    assert tokenizer is not None
    with pytest.raises(TokenizerError) as caught:
        gguf_vocabulary(tokenizer, tokenizer.vocab_size)
    assert caught.value.field == "/model/merges"


def test_metaspace(tmp_path: Path) -> None:
    """The other spelling of SentencePiece's spaces; those that add one only where none is, GGUF cannot say."""

    def spaced(scheme: str) -> Tokenizer:
        backend = tokenizers.Tokenizer.from_str(small.sentencepiece().backend.to_str())
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps if scheme != "never" else steps[:-1])
        made = from_folder(
            small.folder(
                tmp_path / scheme, backend.to_str(), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"}
            )
        )
        assert made is not None
        return made

    never = spaced("never")
    assert gguf_vocabulary(never, never.vocab_size)[KEY + "add_space_prefix"] == ("bool", False)
    same(never, again(never))
    for scheme in ("always", "first"):
        tokenizer = spaced(scheme)
        with pytest.raises(TokenizerError) as caught:
            gguf_vocabulary(tokenizer, tokenizer.vocab_size)
        assert caught.value.field == "/pre_tokenizer"


def test_symbols_that_people_type(tmp_path: Path) -> None:
    """Added tokens that are no control tokens are found in plain text, before and after."""

    def change(backend: Any) -> None:
        backend.add_tokens(["<tool_call>", "\n\n\n", "<|odd|>"])

    tokenizer = json_tokenizer(tmp_path, change)
    other = again(tokenizer)
    text = "so <tool_call>\n\n\nit"
    assert other.encode(text) == tokenizer.encode(text)
    assert set(tokenizer.encode(text)) & {600, 601}
    assert other.encode("a <|odd|>", special=True) == tokenizer.encode("a <|odd|>", special=True)
    assert 602 not in other.encode("a <|odd|>")  # what looks like a control token is one, to a GGUF's reader


def test_bos_eos_and_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": small.CHATML}, {"name": "tool_use", "template": "{{ tools }}"}]
    tokenizer = json_tokenizer(
        tmp_path,
        bos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        add_bos_token=True,
        add_eos_token=True,
        chat_template=templates,
    )
    other = again(tokenizer, eos_ids=(7, 8))
    assert other.encode("hi") == tokenizer.encode("hi")
    assert other.encode("hi")[0] == 0
    assert other.encode("hi")[-1] == 2
    assert other.pad_id == 0
    assert {*other.eos_ids} == {0, 2, 7, 8}
    talk = [{"role": "user", "content": "hello"}]
    assert other.chat(talk) == tokenizer.chat(talk)
    assert other.render_chat(talk, tools=["hammer"]) == tokenizer.render_chat(talk, tools=["hammer"])
    with pytest.raises(TokenizerError, match="three ends"):
        gguf_vocabulary(tokenizer, 600, eos_ids=(7, 8, 9))


def test_a_broken_template_is_left_out_aloud(tmp_path: Path) -> None:
    tokenizer = json_tokenizer(tmp_path, chat_template="{{ ''.__class__ }}")
    with pytest.warns(UserWarning, match="chat template is left out"):
        found = gguf_vocabulary(tokenizer, 600)
    assert "tokenizer.chat_template" not in found


def test_no_tokenizer() -> None:
    found = gguf_vocabulary(None, 64, eos_ids=(3, 5))
    assert found == {
        KEY + "model": ("str", "none"),
        KEY + "eos_token_id": ("u32", 3),
        KEY + "eot_token_id": ("u32", 5),
    }


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "rows", "pre"),
    [
        ("qwen3", 151_936, "qwen2"),
        ("llama3", 128_256, "llama3"),
        ("gpt4o", 200_064, "gpt-4o"),
        ("llama2", 32_000, "default"),
        pytest.param("gemma3", 262_208, "default", marks=pytest.mark.slow),
    ],
)
def test_real_tokenizers(name: str, rows: int, pre: str, real_tokenizer: Callable[[str], Path]) -> None:
    tokenizer = from_folder(real_tokenizer(name), vocab_rows=rows)
    assert tokenizer is not None
    found = gguf_vocabulary(tokenizer, rows)
    assert found[KEY + "pre"] == ("str", pre)
    values = {key: value for key, (_, value) in found.items()}
    other = from_gguf(values, lambda key: found[key][0], vocab_rows=rows)
    texts = [text for text in random_texts(400, seed=8) if "▁" not in text]  # Gemma's own symbols, typed as such
    for special in (False, True):
        assert other.encode_batch(texts, special=special) == tokenizer.encode_batch(texts, special=special)
