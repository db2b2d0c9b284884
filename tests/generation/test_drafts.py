"""The same answers with a draft as without: the same tokens, but for near-ties; in deterministic mode the same bits."""

from __future__ import annotations

import asyncio
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.cache import build
from cutaway.errors import DatasetError, RequestError
from cutaway.generation.drafting import Drafting
from cutaway.generation.generate import Generation
from cutaway.generation.pace import Pace
from cutaway.generation.row import Row
from cutaway.generation.sampling import Sampling
from cutaway.generation.session import Session
from cutaway.generation.speculative import Guesses
from cutaway.generation.stop import StopText
from cutaway.model import Model
from cutaway.spec import GenerationSettings
from cutaway.tokenizers.load import from_folder
from tests.generation.sweep import families
from tests.generation.test_constrain import byte_level
from tests.generation.test_deterministic import bits
from tests.generation.test_families import model_of, prompts, same
from tests.reference import tiny, tiny_seq2seq

MORE = 12
WAYS: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "no_repeat_ngram_size": 3},
    {"temperature": 1.0, "seed": 9, "n": 2},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 0.1, "seed": 4},
]


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of window + 4: these texts go round them, and a row that is taken back by five has to be read again."""
    monkeypatch.setattr(build, "SLACK", 4)


@cache
def drafts(name: str) -> dict[str, Any]:
    """The text itself, the model itself, and the model with its weights shaken."""
    shaken = tiny.transformer(name)
    with torch.no_grad():
        for i, weight in enumerate(shaken.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
            weight += 0.1 * weight.std(correction=0) * noise
    return {"prompt": "prompt", "itself": model_of(name), "shaken": Model(shaken)}


def repeating(n: int, seed: int) -> list[int]:
    """A text that says some things again, so that there is something to look up."""
    chance = random.Random(seed)
    words = [[chance.randrange(3, 60) for _ in range(chance.randint(2, 5))] for _ in range(3)]
    return [token for _ in range(n) for token in chance.choice(words)][:n]


def total(results: list[Generation]) -> tuple[int, int]:
    found = [one.speculation for one in results]
    return sum(one.proposed for one in found if one), sum(one.accepted for one in found if one)


@pytest.mark.parametrize("name", families("gemma3-caps", "gpt2"))
def test_the_same_tokens(name: str) -> None:
    """Ragged batches, several choices, penalties and rules; texts that go round a ring and are taken back there."""
    model, ties = model_of(name), 0
    texts = [prompts()[1], [7], repeating(25, 1)]
    for how in WAYS:
        plain = model.generate(texts, max_tokens=MORE, logprobs=1, **how)
        owners = [text for text in texts for _ in range(how.get("n", 1))]
        for who, draft in drafts(name).items():
            if who == "itself" and "n" not in how:
                continue
            found = model.generate(texts, max_tokens=MORE, logprobs=1, draft=draft, draft_tokens=5, **how)
            ties += sum(same(model, *row) for row in zip(owners, plain, found, strict=True))
            proposed, accepted = total(found)
            print(f"\n{name}, {who}, {how}: {accepted} of {proposed} accepted")
            for one, other in zip(plain, found, strict=True):
                assert other.speculation is not None
                if one.tokens == other.tokens:
                    pairs = zip(one.logprobs or [], other.logprobs or [], strict=True)
                    assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)
            if who == "itself":
                assert accepted > 0.9 * proposed > 0
            if who == "shaken":
                assert 0 < accepted < proposed
    assert ties <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.CASES)
def test_every_option_of_every_family(name: str) -> None:
    model, chance, ties, rows = Model(tiny.transformer(name)), random.Random(name), 0, 0
    model.transformer.warned_length = True
    others = drafts(name)
    for seed in range(2):
        texts = [repeating(chance.randint(1, 40), seed * 10 + i) for i in range(chance.randint(2, 6))]
        for temperature in (0.0, 1.0):
            plain = model.generate(texts, max_tokens=24, temperature=temperature, seed=seed)
            for draft in others.values():
                found = model.generate(texts, max_tokens=24, temperature=temperature, seed=seed, draft=draft)
                drawn = seed if temperature else None
                ties += sum(same(model, *row, drawn) for row in zip(texts, plain, found, strict=True))
                rows += len(texts)
    print(f"\n{name}: {ties} near-ties in {rows} answers")
    assert ties <= rows // 50 + 1


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_rotary_positions_that_change_with_the_length(name: str) -> None:
    """Each token is turned as when it was the last, although several are read at once, past the original length too."""
    model = Model(tiny.transformer(name))
    model.transformer.warned_length = True
    text = repeating(60, 3)
    one, many = Session(model.transformer), Session(model.transformer)
    one.feed([text[:50]])
    many.feed([text[:50]])
    text += repeating(40, 4)
    for start in range(50, 96, 5):
        alone = torch.cat([one.feed([[token]]) for token in text[start : start + 3]])
        together = many.feed_each([text[start : start + 5]])
        many.rewind([start + 3])
        torch.testing.assert_close(together[:3], alone, rtol=0, atol=1e-4)
        both = [session.feed([text[start + 3 : start + 5]]) for session in (one, many)]
        torch.testing.assert_close(*both, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_after_each_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ragged rows, some with none, and in pieces: those of one plain pass over each text."""
    import cutaway.generation.passes as module

    model = model_of(name).transformer
    for size in (512, 4):
        monkeypatch.setattr(module, "CHUNK", size)
        session = Session(model, 3)
        session.feed([prompts()[1][:20], [5], prompts()[2]])
        news = [prompts()[1][20:31], [], [9, 8]]
        found = session.feed_each(news).split([11, 0, 2])
        for held, new, logits in zip(session.tokens, news, found, strict=True):
            with torch.no_grad():
                whole = model(torch.tensor([held]))[0, len(held) - len(new) :]
            torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4)


# ── deterministic ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", families("gemma3"))
def test_the_same_bits(name: str) -> None:
    """And the inverse: without the word bits differ, or this would show nothing."""
    model, loose, right = model_of(name), 0, 0
    texts = [[7], repeating(25, 1)]
    for how in WAYS[1:2]:
        wanted = [bits(one) for one in model.generate(texts, max_tokens=MORE, logprobs=0, deterministic=True, **how)]
        plain = [bits(one) for one in model.generate(texts, max_tokens=MORE, logprobs=0, **how)]
        for draft in drafts(name).values():
            asked: dict[str, Any] = {"max_tokens": MORE, "logprobs": 0, "draft": draft, **how}
            found = model.generate(texts, deterministic=True, **asked)
            assert [bits(one) for one in found] == wanted
            right += total(found)[1]
            loose += [bits(one) for one in model.generate(texts, **asked)] != plain
    assert loose > 0
    assert right > 20


# ── positions ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("who", ["prompt", "itself"])
def test_nothing_is_read_past_the_table(who: str) -> None:
    """A text may grow one past the last position; guesses stop short of it."""
    model = Model(tiny.transformer({**tiny.config("gpt2"), "n_positions": 32}))
    text = repeating(20, 2)
    draft: Any = model if who == "itself" else who
    for most in (1, 64):
        for asked in (12, None):
            plain = model.generate([text, text[:5]], max_tokens=asked, temperature=0)
            found = model.generate([text, text[:5]], max_tokens=asked, temperature=0, draft=draft, draft_tokens=most)
            assert found == plain
    assert len(found[0].tokens) == 13
    assert len(found[1].tokens) == 28


# ── encoder–decoders ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["bart", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "marian"))])
def test_encoder_decoders(name: str) -> None:
    """What the source says is a guess, and so is what another encoder–decoder would write."""
    settings = GenerationSettings(decoder_start_id=2)
    model = Model(tiny_seq2seq.transformer(name), settings=settings)
    other = Model(tiny_seq2seq.transformer(name, seed=1), settings=settings)
    texts = [repeating(12, 1), repeating(30, 2), [7]]
    for how in ({"temperature": 0, "n": 1}, {"temperature": 0.8, "seed": 3, "n": 2}):
        plain = model.generate(texts, max_tokens=10, num_beams=1, **how)
        for draft in ("prompt", model, other):
            found = model.generate(texts, max_tokens=10, num_beams=1, draft=draft, **how)
            # A near-tie may fall either way; at these seeds there is none.
            assert [one.tokens for one in found] == [one.tokens for one in plain]
            if draft is model:
                assert total(found)[1] == total(found)[0] > 0


def test_a_source_is_looked_up() -> None:
    """Where an answer says what stands in its source, what comes next there is a guess."""
    guesses = Guesses(Drafting(), 50, Sampling(), [[0], [0], [0]], [[11, 12, 13, 14, 99], [21, 22], [31, 32, 33]])
    rows = []
    for tokens in ([11, 12], [22], [31, 32]):
        rows.append(Row([0], 0, 0, 100, None, StopText([]), 1, tokens=tokens, pace=Pace(8)))
    rows[2].finish_reason = "stop"
    assert guesses.ahead(rows) == [[13, 14], [], []]  # 99 is in the source's vocabulary alone
    guesses.select([0])
    rows[0].tokens.append(13)
    assert guesses.ahead(rows[:1]) == [[14]]


# ── forms ────────────────────────────────────────────────────────────────────────────────────────────────────

PARTS = {"name": {"enum": ["ab", "abc"]}, "fine": {"type": "boolean"}}
FORMS: list[dict[str, Any]] = [
    {"regex": r"(cat|dog)(, (cat|dog)){1,3}\."},
    {"choices": ["yes", "yesterday", "no"]},
    {
        "schema": {
            "type": "object",
            "properties": PARTS,
            "required": ["name", "fine"],
            "x-guidance": {"whitespace_flexible": False},
        }
    },
]


@pytest.fixture(scope="module")
def talkers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    tokenizer = byte_level(tmp_path_factory.mktemp("words"))
    values = {**tiny.config("llama"), "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 256}
    ends = GenerationSettings(eos_ids=(tokenizer.special["<end>"],))
    first, second = (Model(tiny.transformer(values, seed=seed), tokenizer, ends) for seed in (0, 1))
    return first, second


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_answers_with_a_form(talkers: tuple[Model, Model], form: dict[str, Any]) -> None:
    """A form goes on by what is chosen; what is guessed moves a copy of it."""
    model, other = talkers
    texts = ["the cat sat", 'yes no {"name":"abc","fine":true} cat, dog, cat, dog.']
    for how in ({"temperature": 0}, {"temperature": 1.0, "seed": 5}):
        plain = model.generate(texts, max_tokens=30, **form, **how)
        for draft in ("prompt", model, other):
            found = model.generate(texts, max_tokens=30, draft=draft, **form, **how)
            assert [(one.text, one.tokens, one.finish_reason) for one in found] == [
                (one.text, one.tokens, one.finish_reason) for one in plain
            ]
            proposed, accepted = total(found)
            if draft is model:
                assert accepted == proposed > 0
            if draft is other:  # as it knows the form too, it is right wherever the form leaves one token
                assert accepted > 0
    assert "stop" in {one.finish_reason for one in plain}


def test_streams(talkers: tuple[Model, Model]) -> None:
    model, other = talkers
    for draft in ("prompt", other):
        for how in (
            {"temperature": 0},
            {"temperature": 1.2, "seed": 2},
            {"temperature": 1.2, "seed": 2, "stop": ["a", "e"]},
        ):
            whole = model.generate("yes no maybe the cat", max_tokens=20, **how)
            stream = model.stream("yes no maybe the cat", max_tokens=20, draft=draft, **how)
            pieces = list(stream)
            assert "".join(pieces) == whole.text
            assert "" not in pieces
            assert stream.result == whole
            assert stream.result.speculation is not None


def test_a_file_of_prompts(tmp_path: Path, talkers: tuple[Model, Model]) -> None:
    """For all of it, or for a line; what makes no sense there is refused with its line."""
    model, other = talkers
    lines = [{"prompt": "the cat the cat"}, {"prompt": "yes no"}, {"prompt": "yes no yes no", "draft": "prompt"}]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    how: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 3}
    found = []
    for draft in (None, other):
        model.generate_file(prompts, out, restart=True, draft=draft, **how)
        found.append([json.loads(line) for line in out.read_text().splitlines()])
    assert [["speculation" in answer for answer in answers] for answers in found] == [[False, False, True], [True] * 3]
    assert [one["tokens"] for one in found[0]] == [one["tokens"] for one in found[1]]
    for bad in ({"draft": 3}, {"draft_tokens": 2}, {"draft": "prompt", "num_beams": 2, "temperature": 0}):
        prompts.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b", **bad}) + "\n")
        with pytest.raises(DatasetError, match=r"prompts\.jsonl:2") as caught:
            model.generate_file(prompts, "-", max_tokens=2)
        assert caught.value.field in ("draft", "draft_tokens")


def test_an_event_loop(talkers: tuple[Model, Model]) -> None:
    model, other = talkers
    how: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3}

    async def both() -> tuple[Generation, str]:
        pieces = [piece async for piece in model.astream("the cat", draft=other, **how)]
        return await model.agenerate("the cat", draft="prompt", **how), "".join(pieces)

    wanted = model.generate("the cat", **how)
    found, text = asyncio.run(both())
    assert (found, text) == (wanted, wanted.text)
    assert found.speculation is not None


def test_told_to_stop(talkers: tuple[Model, Model]) -> None:
    """Before the next pass, be it of the draft."""
    model, other = talkers
    run = model._voice.run("the cat", draft=other, max_tokens=50, temperature=1.0, seed=3)
    passes = 0

    def watch(rows: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 5:
            run.stop()

    run.watch = watch
    for _ in run:
        pass
    assert passes == 5
    assert run.results()[0].finish_reason is None
    assert len(run.rows[0].tokens) == 1  # passes of the prompt, of the draft over it, and of three guesses


def test_words_that_mean_something_else(tmp_path: Path, talkers: tuple[Model, Model]) -> None:
    model, _ = talkers
    data = tmp_path / "tokenizer.json"
    byte_level(tmp_path)
    text = data.read_text(encoding="utf-8")
    again = from_folder(tmp_path)
    assert model.generate("the", max_tokens=2, draft=Model(model.transformer, again)).speculation is not None
    data.write_text(text.replace('"<ctl>"', '"<other>"'), encoding="utf-8")
    changed = from_folder(tmp_path)
    with pytest.raises(RequestError, match="another one in the draft's vocabulary") as caught:
        model.generate("the", max_tokens=2, draft=Model(model.transformer, changed))
    assert caught.value.field == "draft"
    assert (caught.value.expected, caught.value.got) == ("<ctl>", "<other>")
    assert model.generate("the", max_tokens=2, draft=Model(model.transformer)).speculation is not None


# ── a real model ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
@pytest.mark.slow
def test_smollm2(smollm2_path: Path) -> None:
    """Greedy, sampled and deterministic on real weights."""
    model = cutaway.load(smollm2_path)
    texts = ["Once upon a time", "Say it again. Say it again, and say it", "def add(a, b):\n    return"]
    for how in ({"temperature": 0}, {"temperature": 0.8, "seed": 1}):
        plain = model.generate(texts, max_tokens=48, **how)
        found = model.generate(texts, max_tokens=48, draft="prompt", **how)
        ids = [model.encode_prompt(text) for text in texts]
        ties = sum(same(model, *row) for row in zip(ids, plain, found, strict=True))
        print(f"\n{how}: {total(found)[1]} of {total(found)[0]} accepted, {ties} near-ties")
        assert ties <= 1
    wanted = model.generate(texts, max_tokens=24, temperature=0, logprobs=0, deterministic=True)
    found = model.generate(texts, max_tokens=24, temperature=0, logprobs=0, deterministic=True, draft="prompt")
    assert [bits(one) for one in found] == [bits(one) for one in wanted]
