"""T01: text id by id is the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.errors import RequestError
from cutaway.tokenizers import Tokenizer, from_folder
from tests.tokenizers import small
from tests.tokenizers.texts import random_texts


def streamed(tokenizer: Tokenizer, ids: Sequence[int], **kwargs: bool) -> str:
    stream = tokenizer.stream(**kwargs)
    return "".join(stream.push(index) for index in ids) + stream.flush()


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    table = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [table[data[i : i + 1]] for i in range(len(data))]


@pytest.mark.parametrize("tokenizer", [small.byte_level(), small.sentencepiece(), small.sentencepiece(False)])
def test_joined_is_whole(tokenizer: Tokenizer):
    for text in random_texts(300, seed=5):
        for skip in (True, False):
            for goes_on in (True, False):
                kwargs = {"skip_special": skip, "continuation": goes_on}
                for ids in (tokenizer.encode(text), tokenizer.encode(text, special=True)):
                    assert streamed(tokenizer, ids, **kwargs) == tokenizer.decode(ids, **kwargs)


@given(st.lists(st.integers(0, 599), max_size=40), st.booleans())
def test_joined_is_whole_for_nonsense(ids: list[int], skip: bool):
    for tokenizer in (small.byte_level(), small.sentencepiece()):
        ours = [index % tokenizer.vocab_size for index in ids]
        data = b"".join(tokenizer.token_bytes(i) for i in ours if not (skip and i in tokenizer.special.values()))
        want = data.decode("utf-8", "replace")
        want = want.removeprefix(" ") if tokenizer is small.sentencepiece() else want
        assert streamed(tokenizer, ours, skip_special=skip) == tokenizer.decode(ours, skip_special=skip) == want


@pytest.mark.parametrize("tokenizer", [small.byte_level(), small.sentencepiece(False)])
@pytest.mark.parametrize("text", ["a🙂 b", "你好", "é", "👩‍👩‍👧"])
def test_t01_characters_split_over_tokens(tokenizer: Tokenizer, text: str):
    stream = tokenizer.stream()
    seen, waiting = "", 0
    for index in byte_ids(tokenizer, text.encode()):
        piece = stream.push(index)
        waiting = 0 if piece else waiting + 1
        assert waiting <= 3
        assert "\ufffd" not in piece
        seen += piece
    assert seen == text
    assert stream.flush() == ""


@pytest.mark.parametrize("tokenizer", [small.byte_level(), small.sentencepiece(False)])
def test_t01_broken_bytes(tokenizer: Tokenizer):
    cut = "🙂".encode()[:3]
    assert streamed(tokenizer, byte_ids(tokenizer, cut + b" x")) == "\ufffd x"
    stream = tokenizer.stream()
    assert [stream.push(i) for i in byte_ids(tokenizer, b"a\xffb")] == ["a", "\ufffd", "b"]
    assert [stream.push(i) for i in byte_ids(tokenizer, cut)] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_leading_space_is_dropped_once():
    tokenizer = small.sentencepiece()
    ids = tokenizer.encode("  the the")
    assert streamed(tokenizer, ids) == "  the the"
    assert streamed(tokenizer, ids, continuation=True) == "   the the"
    stream = tokenizer.stream()
    for _ in range(2):  # a flushed stream starts anew
        assert "".join(map(stream.push, ids)) + stream.flush() == "  the the"


def test_words_stream_too(tmp_path: Path):
    tokenizer = from_folder(small.folder(tmp_path, small.word_piece()))
    assert tokenizer is not None
    ids = tokenizer.encode("the unaffable cats . don't")
    assert streamed(tokenizer, ids) == tokenizer.backend.decode(ids)
    with pytest.raises(RequestError):
        tokenizer.stream().push(99)
