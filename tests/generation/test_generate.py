"""The loop, with a model that says what it is told: ends, text, usage, arguments."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutaway.errors import ContextExceeded, RequestError
from cutaway.generation.generate import Run
from cutaway.generation.params import resolve
from cutaway.spec import GenerationSettings
from tests.generation.scripted import VOCAB, Bytes, Scripted, say
from tests.generation.test_stop import cut

END = 270  # a token that the tokenizer gives no text


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (list("a🙂 b".encode()), "a🙂 b"),
        (list("你好".encode()), "你好"),
        ([*"🙂".encode()[:3], ord(" "), ord("x")], "� x"),
        ([0xFF], "�"),
        ([ord("a"), *"🙂".encode()[:2]], "a�"),
    ],
)
def test_characters_are_shown_whole(tokens: list[int], text: str) -> None:
    """Case T01."""
    pieces, result = say(tokens, max_tokens=len(tokens))
    assert "".join(pieces) == result.text == text == bytes(tokens).decode("utf-8", "replace")
    assert all("�" not in piece for piece in pieces) or "�" in text
    assert (result.finish_reason, result.tokens) == ("length", tokens)


def test_nothing_waits_longer_than_a_character() -> None:
    shown = ""
    run = Run(
        *_stub([*"a🙂b".encode()]), [[7, 8, 9]], resolve(GenerationSettings(), VOCAB, temperature=0, max_tokens=6)
    )
    for _, piece in run:
        shown += piece
        done = bytes(run.rows[0].tokens)
        assert len(done) - len(shown.encode()) <= 3
    assert shown == "a🙂b"


def _stub(tokens: list[int]) -> tuple[Any, Any]:
    return Scripted([0, 0, *tokens]), Bytes()


@given(st.text("ab🙂", max_size=12), st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3))
def test_text_up_to_its_first_stop(text: str, stops: list[str]) -> None:
    tokens = list(text.encode())
    pieces, result = say([*tokens, END], more={END: None}, eos_ids=[END], stop=stops)
    assert "".join(pieces) == result.text == cut(text, stops)
    assert result.finish_reason == "stop"
    stopped = result.text != text
    assert result.tokens == ([*tokens, END] if not stopped else tokens[: len(result.tokens)])


def test_held_text_comes_out_at_every_end() -> None:
    """``EN`` could have become ``END``; nothing follows, so it is text."""
    for tokens, arguments in (
        ([*b"theEN", END], {"eos_ids": [END], "more": {END: None}}),
        ([*b"theEN", END], {"stop": ["END", END]}),
        ([*b"theEN"], {"max_tokens": 5}),
    ):
        pieces, result = say(tokens, **{"stop": "END", **arguments})
        assert "".join(pieces) == result.text == "theEN"


def test_a_stop_within_one_token() -> None:
    """What the token holds after the stop is not shown, nor is anything later."""
    pieces, result = say([260, 261, 262], more={260: b"one ", 261: b"two END three", 262: b"four"}, stop="END")
    assert pieces == ["one ", "two "]
    assert (result.text, result.tokens, result.finish_reason) == ("one two ", [260, 261], "stop")


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    assert say(list(b"abc"), stop="c", max_tokens=3)[1].finish_reason == "stop"
    assert say([97, END], eos_ids=[END], more={END: None}, max_tokens=2)[1].finish_reason == "stop"
    # The last bytes are no character; what is shown for them is a stop text.
    assert say([97, 0xF0], stop="�", max_tokens=2)[1].finish_reason == "stop"


def test_the_text_of_a_stop_id_is_not_shown() -> None:
    _, result = say([*b"ab", ord("c"), *b"d"], stop=[ord("c")])
    assert (result.text, result.tokens, result.finish_reason) == ("ab", list(b"abc"), "stop")


@pytest.mark.parametrize(("generation", "said"), [((1, 106), 106), ((1, 106), 1), ((5, 1), 1), ((5, 1), 5)])
def test_every_end_token_ends(generation: tuple[int, ...], said: int) -> None:
    """Case S11; the union itself is made on loading, see test_model.py."""
    _, result = say([*b"hi", said, *b"more"], eos_ids=generation, more={said: b"<end>"})
    assert (result.text, result.finish_reason) == ("hi", "stop")
    assert result.tokens == [*b"hi", said]
    assert result.usage.completion_tokens == 3


# ── length ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [0, 1, 5])
def test_max_tokens(n: int) -> None:
    pieces, result = say(list(b"abcdefgh"), max_tokens=n)
    assert (result.text, result.finish_reason) == ("abcdefgh"[:n], "length")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total_tokens) == (3, n, 3 + n)
    assert "".join(pieces) == result.text


def test_a_huge_max_tokens_is_only_a_limit() -> None:
    assert say([*b"ab", END], eos_ids=[END], more={END: None}, max_tokens=10**30)[1].text == "ab"


def test_no_max_tokens_is_up_to_the_trained_length() -> None:
    for positions, limit, produced in ((9, None, 7), (9, 8, 6), (3, None, 1)):
        model, tokenizer = _stub(list(b"abcdefghijkl"))
        model.spec.max_positions, model.spec.position_limit = positions, limit
        run = Run(model, tokenizer, [[7, 8, 9]], resolve(GenerationSettings(), VOCAB, temperature=0, max_tokens=None))
        list(run)
        assert (len(run.rows[0].tokens), run.rows[0].finish_reason) == (produced, "length")


def test_a_model_without_a_tokenizer_gives_tokens() -> None:
    pieces, result = say(list(b"abc"), text=False, max_tokens=3, logprobs=0)
    assert ("".join(pieces), result.text, result.tokens) == ("", "", list(b"abc"))
    with pytest.raises(RequestError, match="tokenizer") as caught:
        say(list(b"abc"), text=False, stop="a")
    assert caught.value.field == "stop"


# ── beginnings and ends of a run ─────────────────────────────────────────────────────────────────────────────


def test_an_unfinished_run_says_so_and_goes_on() -> None:
    run = Run(*_stub(list(b"abcdef")), [[7, 8, 9]], resolve(GenerationSettings(), VOCAB, max_tokens=6, logprobs=0))
    first = next(iter(run))
    assert first == (0, "a")
    half = run.results()[0]
    assert (half.text, half.finish_reason, len(half.logprobs or [])) == ("a", None, 1)
    assert "".join(piece for _, piece in run) == "bcdef"
    assert run.results()[0].finish_reason == "length"
    assert list(run) == []


def test_rows_stay_whole_when_one_is_looked_at_early() -> None:
    """Stopping between two rows of a step leaves as many log-probabilities as tokens in each."""
    run = Run(*_stub(list(b"abc")), [[7, 8, 9]] * 3, resolve(GenerationSettings(), VOCAB, max_tokens=3, logprobs=1))
    next(iter(run))
    for result in run.results():
        assert len(result.tokens) == len(result.logprobs or []) == len(result.text)


def test_a_run_given_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    plain = Scripted.new_cache

    def watched(self: Scripted, batch: int, capacity: int, **_: Any) -> Any:
        cache = plain(self, batch, capacity)
        held.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(Scripted, "new_cache", watched)
    run = Run(*_stub(list(b"abc")), [[7, 8, 9]], resolve(GenerationSettings(), VOCAB, max_tokens=3))
    next(iter(run))
    assert held[0]() is not None
    del run
    gc.collect()
    assert held[0]() is None


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [1.0], [True], ["a"]])
def test_prompts_that_make_no_sense(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        Run(*_stub([1]), [prompt], resolve(GenerationSettings(), VOCAB))
    assert (caught.value.field or "").startswith("prompt")


def test_bad_logits_end_the_run_with_an_error() -> None:
    model, tokenizer = _stub([1])
    model.unembed = lambda x, tap=None: torch.full((len(x), 1, VOCAB), float("nan"))
    run = Run(model, tokenizer, [[7, 8, 9]], resolve(GenerationSettings(), VOCAB))
    with pytest.raises(RequestError, match="NaN or infinity"):
        list(run)
    assert list(run) == []
    assert run.results()[0].finish_reason is None


def test_a_prompt_past_the_table() -> None:
    model, tokenizer = _stub([1])
    model.spec.position_limit = 2
    with pytest.raises(ContextExceeded) as caught:
        Run(model, tokenizer, [[7, 8, 9]], resolve(GenerationSettings(), VOCAB))
    assert (caught.value.field, caught.value.got) == ("prompt", "3")
