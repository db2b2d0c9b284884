"""Guessing ahead, with models that say what they are told: what is guessed, what is counted, what is refused.

That an answer is the same with a draft as without is in test_drafts.py, its distribution in test_draft_odds.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutaway.errors import RequestError
from cutaway.generation.drafting import MOST_TOKENS, Drafting
from cutaway.generation.generate import Generation, Run
from cutaway.generation.lookup import LONGEST, SHORTEST, Indexed
from cutaway.generation.pace import FEWEST, Pace, Speculation
from cutaway.generation.params import resolve
from cutaway.model import Model
from cutaway.models import Transformer
from cutaway.spec import GenerationSettings
from tests.generation.scripted import VOCAB, Bytes, Chain, Scripted
from tests.reference import tiny, tiny_seq2seq


def ids(n: int = 5) -> list[int]:
    return tiny.ids(n).tolist()


# ── looking up ───────────────────────────────────────────────────────────────────────────────────────────────


def followed(text: list[int], n: int) -> list[int]:
    """What ``Indexed.guess`` says, by trying every place."""
    for size in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        starts = [i + size for i in range(len(text) - size) if text[i : i + size] == text[-size:]]
        if starts:
            out = list(text)
            for place in range(n):
                out.append(out[starts[-1] + place])
            return out[len(text) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 30), st.integers(0, 12))
def test_the_longest_end_and_its_last_place(text: list[int], cut: int, n: int) -> None:
    indexed = Indexed(text[:cut])
    one, two = indexed.copy(), indexed.copy()
    one.extend(text[cut:])
    two.extend([9, *text[cut:]])  # what one goes on with is not in the other
    assert one.guess(n) == followed(text, n)
    assert two.guess(n) == followed([*text[:cut], 9, *text[cut:]], n)
    assert one.more == len(text[cut:])


def test_a_guess_by_hand() -> None:
    text = Indexed([5, 1, 2, 3, 7, 7, 9, 2, 3, 8])
    text.extend([1, 2, 3])
    assert text.guess(2) == [7, 7]  # after 1 2 3, although 2 3 came later, before 8
    assert Indexed([4, 5]).guess(3) == []
    assert Indexed([4, 4]).guess(3) == []  # one token is too little
    assert Indexed([4, 4, 4]).guess(3) == [4, 4, 4]


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────


def say(
    script: list[int],
    prompt: list[int],
    draft: Any = None,
    most: int = 8,
    eos_ids: tuple[int, ...] = (),
    text: bool = True,
    **arguments: Any,
) -> tuple[list[str], Generation]:
    """What a model says whose n-th token after a prompt is ``script[n]``."""
    sampling = resolve(GenerationSettings(eos_ids=eos_ids), VOCAB, temperature=0, **arguments)
    model: Any = Scripted([*[0] * (len(prompt) - 1), *script])
    tokenizer: Any = Bytes() if text else None
    run = Run(model, tokenizer, [prompt], sampling, drafting=Drafting(draft, most))
    pieces = [piece for _, piece in run]
    return pieces, run.results()[0]


def test_counts_by_hand() -> None:
    """The prompt holds what the model says."""
    said = list(range(10, 30))
    _, result = say(said, [9, *said, 99, 9], max_tokens=20)
    # The prompt's pass gives 10, and 9 10 stands in the prompt. Then 3, 7 and, as there is room for 7 more tokens, 6
    # are guessed, all rightly, and each pass gives one more.
    assert result.tokens == said
    assert result.speculation == Speculation(proposed=3 + 7 + 6, accepted=16, passes=4)
    assert result.speculation.acceptance == 1.0


def test_wrong_guesses_are_counted_and_cost_no_token() -> None:
    said = [1, 2, 3, 9, 1, 2, 3, 9, 7, 5]
    _, result = say(said, [1, 2, 3, 4, 8], max_tokens=10)
    # Passes give 1 and 2, for 8 1 is new. After 1 2 come 3 4 8, of which 3 is right, then 9; 1 and 2 come alone again.
    # After 1 2 came 3 9 1 at last, of which two are right, then 7; and 5.
    assert result.tokens == said
    assert result.speculation == Speculation(proposed=3 + 3, accepted=1 + 2, passes=7)
    assert result.speculation.acceptance == pytest.approx(0.5)


def test_a_draft_that_is_wrong_in_one_place() -> None:
    """Models count 0 1 2 3 4 0 …; the draft takes 2 4 for it, and sees what was chosen instead."""
    table = torch.eye(5).roll(1, 1) * 9
    other = table.clone()
    other[2] = other[3]
    model: Any = Chain(table)
    draft: Any = Chain(other)
    run = Run(
        model, None, [[0]], resolve(GenerationSettings(), 5, temperature=0, max_tokens=20), drafting=Drafting(draft)
    )
    list(run)
    assert run.rows[0].tokens == [1, 2, 3, 4, 0] * 4
    # After 1: 2 4 0, and 2 3 is right. 4 0 1, right, and 2. Seven from 4 0 1 on, and 3. The last two once more, and
    # again 4 0 1 and 2. Then there is room for two, 4 0, and for one, 4.
    guessed, right = [3, 3, 7, 3, 7, 3, 2, 1], [1, 3, 0, 3, 0, 3, 0, 1]
    assert run.results()[0].speculation == Speculation(sum(guessed), sum(right), 9)
    assert draft.passes == 1 + sum(guessed)


def test_pace() -> None:
    pace = Pace(8)
    assert (pace.width, pace.ahead(100), pace.ahead(3), pace.ahead(1)) == (FEWEST, FEWEST, 2, 0)
    steps = [(3, 3, 7), (7, 7, 8), (8, 5, 6), (6, 1, 3), (0, 0, 3), (3, 0, 3), (2, 2, 7)]
    for proposed, accepted, width in steps:
        pace.note(proposed, accepted)
        assert pace.width == pace.ahead(100) == width
    assert pace.done == Speculation(29, 18, 7)
    assert Speculation().acceptance is None
    assert Pace().ahead(100) == 0
    assert Pace(1).ahead(100) == 1


def test_passes_are_passes() -> None:
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)) * 4
    for draft in (None, Chain(table), Chain(table.flip(0))):
        model: Any = Chain(table)
        run = Run(model, None, [[1, 2, 3]], resolve(GenerationSettings(), 6, max_tokens=40, temperature=1, seed=2),
                  drafting=Drafting(draft, 5))  # type: ignore[arg-type]  # fmt: skip
        list(run)
        found = run.results()[0].speculation
        assert found is not None
        assert found.passes == model.passes < 40
        assert found.accepted + found.passes == 40


def test_without_a_draft_there_is_nothing_to_report() -> None:
    sampling = resolve(GenerationSettings(), VOCAB, temperature=0, max_tokens=3)
    model: Any = Scripted([0, 1, 2, 3])
    run = Run(model, None, [[7]], sampling)
    list(run)
    assert run.results()[0].speculation is None


# ── ends, in the midst of what was guessed ───────────────────────────────────────────────────────────────────

ENDS: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 7},
    {"max_tokens": 40},
    {"stop": "ef"},
    {"stop": ["fg", "c"]},
    {"stop": [ord("f")]},
    {"eos_ids": (ord("g"),)},
    {"eos_ids": (ord("b"),), "stop": "bc"},
    {"min_tokens": 12, "eos_ids": (ord("c"),), "logit_bias": {ord("z"): 1.0}},
]


@pytest.mark.parametrize("who", ["prompt", "itself", "another"])
@pytest.mark.parametrize("how", ENDS, ids=str)
def test_ends(how: dict[str, Any], who: str) -> None:
    """Nothing after an end is shown, kept, counted as a token or reported, however much was guessed beyond it."""
    said = [*b"abcdefghij" * 4]
    prompt = [*b"abcdefghijabcdefghijk"]
    how = {"max_tokens": 30, "logprobs": 2, **how}
    drafts = {"prompt": None, "itself": Scripted([*[0] * 20, *said]), "another": Scripted([*[0] * 21, *said])}
    pieces, found = say(said, prompt, drafts[who], **how)
    eos_ids = how.pop("eos_ids", ())
    model: Any = Scripted([*[0] * 20, *said])
    tokenizer: Any = Bytes()
    plain = Run(model, tokenizer, [prompt], resolve(GenerationSettings(eos_ids=eos_ids), VOCAB, temperature=0, **how))
    wanted_pieces = [piece for _, piece in plain]
    assert found == plain.results()[0]
    assert [piece for piece in pieces if piece] == [piece for piece in wanted_pieces if piece]
    assert found.usage.completion_tokens == len(found.tokens) == len(found.logprobs or [])
    assert found.speculation is not None
    assert found.speculation.accepted + found.speculation.passes >= len(found.tokens)
    if who == "itself" and len(found.tokens) > 5:
        assert found.speculation.passes < len(found.tokens)


# ── who may guess ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_makes_no_sense() -> None:
    model = Model(tiny.transformer("llama"))
    for arguments, field, says in (
        ({"draft_tokens": 4}, "draft_tokens", "no draft"),
        ({"draft": "prompt", "draft_tokens": 0}, "draft_tokens", "1…64"),
        ({"draft": "prompt", "draft_tokens": MOST_TOKENS + 1}, "draft_tokens", "1…64"),
        ({"draft": "prompt", "draft_tokens": True}, "draft_tokens", "whole"),
        ({"draft": "prompt", "draft_tokens": 2.0}, "draft_tokens", "whole"),
        ({"draft": "Prompt"}, "draft", "prompt"),
        ({"draft": 3}, "draft", "cutaway.Model"),
        ({"draft": model.transformer}, "draft", "cutaway.Model"),
        ({"draft": "prompt", "num_beams": 2, "temperature": 0}, "draft", "beams"),
        ({"draft": model, "num_beams": 2}, "draft", "beams"),
    ):
        for call in (model.generate, model.stream):
            with pytest.raises(RequestError, match=says) as caught:
                call(ids(), max_tokens=2, **arguments)
            assert caught.value.field == field


def test_a_draft_of_another_kind() -> None:
    model = Model(tiny.transformer("llama"))
    wider = Model(tiny.transformer({**tiny.config("llama"), "vocab_size": 65}))
    headless = Model(Transformer(replace(model.spec, head=None)))
    pair = Model(tiny_seq2seq.transformer("t5"), settings=GenerationSettings(decoder_start_id=0))
    for target, draft, says in (
        (model, wider, "another vocabulary"),
        (model, headless, "does not say what comes next"),
        (model, pair, "encoder–decoder"),
        (pair, model, "encoder–decoder"),
    ):
        with pytest.raises(RequestError, match=says) as caught:
            target.generate(ids(), max_tokens=2, draft=draft)
        assert caught.value.field == "draft"


@pytest.mark.parametrize("when", [0, 3])
def test_a_draft_that_knows_no_numbers(when: int) -> None:
    """It is named, not passed over."""
    table = torch.eye(6).roll(1, 1) * 9
    broken = table.clone()
    broken[(2 + when) % 6, 1] = float("nan")
    target: Any = Chain(table)
    draft: Any = Chain(broken)
    run = Run(
        target, None, [[1]], resolve(GenerationSettings(), 6, temperature=0, max_tokens=30), drafting=Drafting(draft)
    )
    with pytest.raises(RequestError, match="draft model's logits") as caught:
        list(run)
    assert caught.value.field == "draft"


def test_a_dead_end_of_the_draft_is_none_of_the_answer() -> None:
    """After 2 nothing may come: the draft goes there, the answer does not."""
    goes, likes = torch.zeros(4, 4), torch.zeros(4, 4)
    goes[[0, 1, 3], [1, 3, 1]] = likes[[0, 1, 2, 3], [1, 2, 2, 2]] = 9.0
    target: Any = Chain(goes)
    draft: Any = Chain(likes)
    sampling = resolve(GenerationSettings(), 4, temperature=0, max_tokens=5, bad_words=[[2, i] for i in range(4)])
    plain, run = (Run(target, None, [[0]], sampling, drafting=one) for one in (None, Drafting(draft)))
    for each in (plain, run):
        list(each)
    assert run.results() == plain.results()
    assert run.results()[0].tokens == [1, 3, 1, 3, 1]
    found = run.results()[0].speculation
    assert found is not None
    assert found.proposed == 3
    astray = Run(draft, None, [[0]], sampling)
    with pytest.raises(RequestError, match="no token to choose"):
        list(astray)


def test_a_short_draft_falls_silent() -> None:
    """Where it has no position, and where it was not trained to read, it guesses nothing and nothing is said."""
    target = Model(tiny.transformer("gpt2"))
    short = Model(tiny.transformer({**tiny.config("gpt2"), "n_positions": 16}))
    wanted = target.generate(ids(10), max_tokens=30, temperature=0)
    found = target.generate(ids(10), max_tokens=30, temperature=0, draft=short)
    assert found == wanted
    assert found.speculation is not None
    assert found.speculation.proposed
    at_once = target.generate([ids(20), ids(3)], max_tokens=10, temperature=0, draft=short)
    assert at_once == target.generate([ids(20), ids(3)], max_tokens=10, temperature=0)
    assert [one.speculation.proposed > 0 for one in at_once] == [False, True]
