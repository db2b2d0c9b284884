"""Each rule about the next token, against transformers' own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation import rules
from cutaway.generation.params import Sampling, resolve
from cutaway.generation.rules import Rules
from cutaway.spec import GenerationSettings

VOCAB, ROWS = 23, 6
ENDS = (2, 7)
NEVER = float("-inf")


@pytest.fixture(scope="module")
def hf() -> Any:
    import transformers.generation.logits_process as module

    return module


def texts(n: int, seed: int = 0, few: int = 4) -> Tensor:
    """Texts over few tokens, so that they repeat themselves. [rows, n]"""
    return torch.randint(3, 3 + few, (ROWS, n), generator=torch.Generator().manual_seed(seed))


def scores(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 12, 40])
def test_no_repeat_ngram(hf: Any, n: int, length: int) -> None:
    for seed in range(4):
        ids, x = texts(length, seed), scores(seed)
        before = x.clone()
        assert torch.equal(rules.no_repeat_ngram(x, ids.tolist(), n), hf.NoRepeatNGramLogitsProcessor(n)(ids, x))
        assert torch.equal(x, before)


@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_bad_words(hf: Any, length: int) -> None:
    chance = random.Random(length)
    for seed in range(8):
        ids, x = texts(length, seed, few=2), scores(seed)
        words = [[chance.randint(3, 4) for _ in range(chance.randint(1, 4))] for _ in range(5)] + [[9], [2], [3, 2]]
        assert torch.equal(rules.bad_words(x, ids.tolist(), words), hf.NoBadWordsLogitsProcessor(words)(ids, x))
        ours = Rules(bad_words=tuple(map(tuple, words))).apply(x, ids.tolist(), [[]] * ROWS, [None] * ROWS, ENDS)
        assert torch.equal(ours, hf.NoBadWordsLogitsProcessor(words, list(ENDS))(ids, x))


@pytest.mark.parametrize("least", [0, 1, 4, 5, 6, 9])
def test_least_lengths(hf: Any, least: int) -> None:
    ids, x = texts(5), scores()
    split: Any = (ids[:, :3].tolist(), ids[:, 3:].tolist(), [None] * ROWS, ENDS)
    wanted = hf.MinLengthLogitsProcessor(least, list(ENDS))(ids, x)
    assert torch.equal(Rules(min_length=least).apply(x, *split), wanted)
    wanted = hf.MinNewTokensLengthLogitsProcessor(3, least, list(ENDS))(ids, x)
    assert torch.equal(Rules(min_tokens=least).apply(x, *split), wanted)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("token", [0, 5])
def test_forced_tokens(hf: Any, length: int, token: int) -> None:
    ids, x = texts(length), scores()
    prompts, produced = ids[:, :1].tolist(), ids[:, 1:].tolist()
    wanted = hf.ForcedBOSTokenLogitsProcessor(token)(ids, x)
    assert torch.equal(Rules(forced_bos_id=token).apply(x, prompts, produced, [None] * ROWS, ENDS), wanted)
    for room in (1, 2, 5):
        for forced in ((token,), (token, 7)):
            wanted = hf.ForcedEOSTokenLogitsProcessor(1 + room, list(forced))(ids, x)
            ours = Rules(forced_eos_ids=forced).apply(x, prompts, produced, [room] * ROWS, ENDS)
            assert torch.equal(ours, wanted)


@pytest.mark.parametrize("start", [1, 3])
@pytest.mark.parametrize("forced", [None, 4])
def test_suppressed_tokens(hf: Any, start: int, forced: int | None) -> None:
    begin = start if start > 1 or forced is None else start + 1  # as transformers' generate reckons it
    for length in (start, start + 1, start + 2):
        ids, x = texts(length), scores()
        prompts, produced = ids[:, :start].tolist(), ids[:, start:].tolist()
        wanted = x if forced is None else hf.ForcedBOSTokenLogitsProcessor(forced)(ids, x)
        wanted = hf.SuppressTokensLogitsProcessor([3, 8])(ids, wanted)
        wanted = hf.SuppressTokensAtBeginLogitsProcessor([5, 6], begin)(ids, wanted)
        ours = Rules(suppress_ids=(3, 8), begin_suppress_ids=(5, 6), forced_bos_id=forced)
        assert torch.equal(ours.apply(x, prompts, produced, [None] * ROWS, ENDS), wanted)


def test_all_in_their_order(hf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every length: as transformers' own generate puts them together for the same settings."""
    from transformers import GenerationConfig
    from transformers.generation.utils import GenerationMixin

    settings = GenerationSettings(
        eos_ids=ENDS,
        repetition_penalty=1.3,
        min_length=4,
        no_repeat_ngram_size=2,
        bad_words_ids=((9,), (3, 4), (2,)),
        suppress_ids=(8, 10),
        begin_suppress_ids=(5,),
        forced_bos_id=6,
        forced_eos_ids=(2,),
    )
    config = GenerationConfig(
        repetition_penalty=1.3,
        min_length=4,
        no_repeat_ngram_size=2,
        bad_words_ids=[[9], [3, 4], [2]],
        suppress_tokens=[8, 10],
        begin_suppress_tokens=[5],
        forced_bos_token_id=6,
        forced_eos_token_id=2,
        max_length=9,
    )
    config._eos_token_tensor = torch.tensor(ENDS)
    asks: Any = type("Asks", (GenerationMixin,), {"config": type("Config", (), {"is_encoder_decoder": False})()})()
    seen: list[Tensor] = []
    monkeypatch.setattr("cutaway.generation.logits.greedy", lambda x: seen.append(x) or [0] * len(x))
    for start in (1, 2):
        chain = GenerationMixin._get_logits_processor(asks, config, start, device="cpu")
        assert len(chain) == 8
        for length in range(start, 9):
            ids, x = texts(length, length), scores(length)
            sampling = resolve(settings, VOCAB, max_tokens=9 - start)
            prompts, produced = ids[:, :start].tolist(), ids[:, start:].tolist()
            sampling.choose(x, prompts, produced, [0] * ROWS, [9 - start] * ROWS)
            assert torch.equal(seen.pop(), chain(ids, x)), (start, length)


def test_rows_have_their_own_lengths() -> None:
    """What is a beginning in one row is an end in another, and neither minds the other."""
    every = Rules(2, ((4, 5),), 4, 2, 6, (2,), (8,), (9,))
    prompts = [[3], [3, 4], [3, 4, 5, 4], [4]]
    produced = [[], [4, 3, 3], [], [4, 5, 4]]
    rooms = [3, 4, 1, None]
    x = scores()[:4]
    together = every.apply(x, prompts, produced, rooms, ENDS)
    for i in range(4):
        alone = every.apply(x[i : i + 1], prompts[i : i + 1], produced[i : i + 1], rooms[i : i + 1], ENDS)
        assert torch.equal(together[i : i + 1], alone)


def test_rules_that_leave_nothing() -> None:
    for rules_ in (
        Rules(suppress_ids=tuple(range(VOCAB))),
        Rules(forced_bos_id=5, bad_words=((5,),), suppress_ids=(5,)),
    ):
        with pytest.raises(RequestError, match="leaves no token"):
            Sampling(rules=rules_).choose(scores(), [[3]] * ROWS, [[]] * ROWS, [0] * ROWS)


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────

OWN = GenerationSettings(
    eos_ids=(2,), min_p=0.1, repetition_penalty=1.2, num_beams=3, length_penalty=2.0, early_stopping=True,
    renormalize=True, min_length=5, max_new_tokens=40, no_repeat_ngram_size=3, bad_words_ids=((1, 2),),
    suppress_ids=(3,), begin_suppress_ids=(4,), forced_bos_id=5, forced_eos_ids=(6,),
)  # fmt: skip


def test_what_is_left_out_comes_from_the_checkpoint() -> None:
    own = resolve(OWN, 64)
    assert own.rules == Rules(3, ((1, 2),), 5, 0, 5, (6,), (3,), (4,))
    assert (own.min_p, own.repetition_penalty, own.max_tokens) == (0.1, 1.2, 40)
    assert (own.num_beams, own.length_penalty, own.early_stopping, own.renormalize) == (3, 2.0, True, True)
    mine = resolve(
        OWN, 64, no_repeat_ngram_size=0, bad_words=[7, [8, 9], "no"], min_tokens=1, num_beams=1, length_penalty=-1,
        early_stopping="never", repetition_penalty=1, min_p=0, max_tokens=None,
    )  # fmt: skip
    assert mine.rules == Rules(0, ((1, 2), (7,), (8, 9)), 0, 1, 5, (6,), (3,), (4,))
    assert (mine.bad_words, mine.min_p, mine.repetition_penalty, mine.max_tokens) == (("no",), 0, 1, None)
    assert (mine.num_beams, mine.length_penalty, mine.early_stopping) == (1, -1, "never")
    assert resolve(OWN, 64, early_stopping=False).early_stopping is False
    assert resolve(OWN, 64, bad_words="no").bad_words == ("no",)
    assert resolve(OWN, 64, bad_words=5).rules.bad_words == ((1, 2), (5,))


def test_how_long_an_answer_is_when_nobody_says() -> None:
    assert resolve(GenerationSettings(), 64).max_tokens == 256
    assert resolve(GenerationSettings(max_new_tokens=9), 64).max_tokens == 9
    assert resolve(GenerationSettings(max_new_tokens=9, max_length=30), 64).max_tokens == 9
    short = resolve(GenerationSettings(max_length=30), 64)
    assert (short.max_tokens, short.max_length) == (None, 30)
    for said in (None, 0, 7):
        named = resolve(GenerationSettings(max_new_tokens=9, max_length=30), 64, max_tokens=said)
        assert (named.max_tokens, named.max_length) == (said, None)


def test_beams_or_a_temperature() -> None:
    warm = GenerationSettings(temperature=0.7, num_beams=4)
    for own, arguments, wanted in (
        (GenerationSettings(), {}, (1, 0.0)),
        (GenerationSettings(temperature=0.7), {}, (1, 0.7)),
        (GenerationSettings(temperature=0.7), {"num_beams": 2}, (2, 0.0)),
        (GenerationSettings(num_beams=4), {}, (4, 0.0)),
        (GenerationSettings(num_beams=4), {"temperature": 0.7}, (1, 0.7)),
        (GenerationSettings(num_beams=4), {"temperature": 0}, (4, 0.0)),
        (warm, {}, (4, 0.0)),
        (warm, {"num_beams": 1}, (1, 0.7)),
        (warm, {"temperature": 0}, (4, 0.0)),
    ):
        found = resolve(own, 64, **arguments)
        assert (found.num_beams, found.temperature) == wanted


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *[("num_beams", {"num_beams": value}) for value in (0, -1, 1.0, True, "2", 1025)],
        ("num_beams", {"num_beams": 2, "temperature": 0.5}),
        ("n", {"num_beams": 2, "n": 3}),
        ("stop", {"num_beams": 2, "stop": "END"}),
        *[("length_penalty", {"length_penalty": value}) for value in (float("nan"), 51, -51, "1", True)],
        *[("early_stopping", {"early_stopping": value}) for value in (1, 0, "always", [True])],
        *[("min_tokens", {"min_tokens": value}) for value in (-1, 1.0, True)],
        *[("no_repeat_ngram_size", {"no_repeat_ngram_size": value}) for value in (-1, 1.0, True)],
        *[("bad_words", {"bad_words": value}) for value in ({"a": 1}, 1.5, b"a")],
        *[("bad_words/1", {"bad_words": [3, value]}) for value in ("", [])],
        *[("bad_words/1/0", {"bad_words": [3, value]}) for value in (64, -1, True, 1.5, None, ["a"], [64])],
        *[("max_tokens", {"max_tokens": value}) for value in ("all", -1, 1.0)],
    ],
)
def test_arguments_that_make_no_sense(name: str, arguments: Any) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(GenerationSettings(), 64, **arguments)
    assert caught.value.field == name


def test_forbidden_texts_are_forbidden_wherever_they_stand() -> None:
    """At a beginning, after a space, and going on: a tokenizer may write each in its own way."""
    from cutaway.generation.words import with_words

    class Spells:
        def encode(self, text: str, *, bos: bool | None = None, continuation: bool = False) -> list[int]:
            assert bos is False or continuation
            return [ord(c) for c in (text if continuation else "_" + text)]

    spells: Any = Spells()
    found = with_words(resolve(GenerationSettings(), 64, bad_words=["a", [3]]), spells)
    assert found.rules.bad_words == ((3,), (95, 97), (97,), (32, 97))
    with pytest.raises(RequestError, match="tokenizer") as caught:
        with_words(resolve(GenerationSettings(), 64, bad_words="a"), None)
    assert caught.value.field == "bad_words"
