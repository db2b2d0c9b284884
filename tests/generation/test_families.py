"""Whole generations of tiny models: alone and together, cached and not, streamed and not."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import pytest
import torch

from cutaway.cache import build
from cutaway.errors import ContextExceeded
from cutaway.model import Model
from tests.generation.company import same, uncached
from tests.generation.scripted import Bytes
from tests.generation.sweep import FEW, families
from tests.reference import tiny

LENGTHS = (1, 40, 7)
MORE = 9


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of window + 4, so that these texts go round them."""
    monkeypatch.setattr(build, "SLACK", 4)


_MADE: dict[str, Model] = {}


def model_of(name: str) -> Model:
    if name not in _MADE:
        _MADE[name] = Model(tiny.transformer(name))
    return _MADE[name]


def prompts() -> list[list[int]]:
    return [tiny.ids(n, seed=n).tolist() for n in LENGTHS]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_batch_is_its_rows(name: str) -> None:
    """Cases K09 and M09: ragged prompts, which are padded on the right inside."""
    model = model_of(name)
    settings: list[dict[str, Any]] = [
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 9},
    ]
    for arguments in settings:
        together = model.generate(prompts(), max_tokens=MORE, **arguments)
        alone = [model.generate(prompt, max_tokens=MORE, **arguments) for prompt in prompts()]
        ties = sum(same(model, *row) for row in zip(prompts(), together, alone, strict=True))
        assert ties <= 1
        assert len({tuple(result.tokens) for result in together}) > 1


@pytest.mark.parametrize("name", families("gemma3", "gpt2"))
def test_finished_rows_leave(name: str) -> None:
    """Rows end at different times; those that go on are moved together and are not disturbed."""
    model = model_of(name)
    free = [model.generate(prompt, max_tokens=MORE, temperature=1.0, seed=3) for prompt in prompts()]
    for ends in ((1, 3, 7), (2, 8, 2), (0, 0, 0)):
        stop = sorted({result.tokens[end] for result, end in zip(free, ends, strict=True)})
        together = model.generate(prompts(), max_tokens=MORE, temperature=1.0, seed=3, stop=stop)
        for prompt, result, whole in zip(prompts(), together, free, strict=True):
            first = next((i for i, token in enumerate(whole.tokens) if token in stop), MORE - 1)
            assert result.tokens == whole.tokens[: first + 1]
            assert result.finish_reason == ("stop" if result.tokens[-1] in stop else "length")
            assert result.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("name", families("gemma3-caps", "gpt2"))
def test_choices(name: str) -> None:
    """Case V05, and promise D5: a choice depends on seed, number and place, not on how many there are."""
    model = model_of(name)
    two = [prompts()[1], prompts()[2]]
    results = model.generate(two, n=3, max_tokens=8, temperature=1.0, seed=7)
    assert [result.choice for result in results] == [0, 1, 2, 0, 1, 2]
    assert [result.usage.prompt_tokens for result in results] == [40] * 3 + [7] * 3
    assert len({tuple(result.tokens) for result in results}) == 6
    for i, prompt in enumerate(two):
        more = model.generate(prompt, n=5, max_tokens=8, temperature=1.0, seed=7)
        assert [r.tokens for r in more[:3]] == [r.tokens for r in results[3 * i : 3 * i + 3]]
        assert model.generate(prompt, max_tokens=8, temperature=1.0, seed=7).tokens == more[0].tokens
        # The place in the text decides, not how much of it was given: a text that was broken off goes on as it would.
        rest = model.generate(prompt + more[0].tokens[:3], max_tokens=5, temperature=1.0, seed=7)
        assert rest.tokens == more[0].tokens[3:]
    assert results[0].tokens != model.generate(two[0], max_tokens=8, temperature=1.0, seed=8).tokens


@pytest.mark.parametrize("name", families(*FEW))
def test_logprobs_are_those_of_the_whole_text(name: str) -> None:
    model = model_of(name)
    worst = 0.0
    for prompt in (prompts()[1], prompts()[2]):
        result = model.generate(prompt, max_tokens=MORE, temperature=1.3, top_k=9, seed=1, logprobs=5)
        logprobs = uncached(model.transformer, prompt + result.tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        assert result.logprobs is not None
        assert len(result.logprobs) == MORE
        for entry, token, row in zip(result.logprobs, result.tokens, logprobs, strict=True):
            best = row.topk(5)
            assert entry.token == token
            assert entry.logprob <= 0
            worst = max(worst, abs(entry.logprob - float(row[token])))
            worst = max(worst, float((torch.tensor([p for _, p in entry.top]) - best.values).abs().max()))
            assert all(abs(p - float(row[t])) < 1e-4 for t, p in entry.top)
            assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
    print(f"{name}: logprobs {worst:.1e}")
    assert worst <= 1e-4
    # 0 reports the chosen tokens only, None reports nothing, many report all there are.
    assert all(entry.top == () for entry in model.generate(prompts()[2], max_tokens=3, logprobs=0).logprobs or [1])
    assert model.generate(prompts()[2], max_tokens=3).logprobs is None
    wide = model.generate(prompts()[2], max_tokens=1, logprobs=10**6).logprobs
    assert wide is not None
    assert sum(torch.tensor(p).exp() for _, p in wide[0].top) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", families(*FEW))
def test_score(name: str) -> None:
    """Case S12: entry t is read at t − 1, and what was generated scores as it was reported."""
    model = model_of(name)
    result = model.generate(prompts()[2], max_tokens=MORE, temperature=1.0, seed=2, logprobs=0)
    ids = prompts()[2] + result.tokens
    score = model.score(ids)
    logprobs = uncached(model.transformer, ids).log_softmax(-1)
    assert score.tokens == ids
    assert score.logprobs[0] is None
    for t in range(1, len(ids)):
        assert score.logprobs[t] == pytest.approx(float(logprobs[t - 1, ids[t]]), abs=1e-5)
    for value, entry in zip(score.logprobs[len(prompts()[2]) :], result.logprobs or [], strict=True):
        assert value == pytest.approx(entry.logprob, abs=1e-4)
    assert score.total == pytest.approx(sum(value or 0 for value in score.logprobs))
    assert model.score(ids[:1]).logprobs == [None]


def test_score_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    import cutaway.generation.logprobs as module

    model, ids = model_of("llama"), tiny.ids(33).tolist()
    whole = model.score(ids).logprobs[1:]
    for size in (1, 7, 32, 33):
        monkeypatch.setattr(module, "LARGEST", size * model.spec.vocab_size)
        assert model.score(ids).logprobs[1:] == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("name", families("llama", "gemma3"))
def test_a_long_prompt_is_read_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cutaway.generation.passes as module

    model = model_of(name)
    whole = model.generate(prompts(), max_tokens=5, temperature=0)
    monkeypatch.setattr(module, "CHUNK", 6)
    for prompt, one, other in zip(
        prompts(), whole, model.generate(prompts(), max_tokens=5, temperature=0), strict=True
    ):
        same(model, prompt, one, other)


@pytest.mark.parametrize("name", families("gpt2"))
@pytest.mark.parametrize("stop", [None, "a", ["b", "ca", 40]])
def test_a_stream_is_the_whole(name: str, stop: Any) -> None:
    tokenizer: Any = Bytes({i: "abc🙂".encode()[i % 7 : i % 7 + 1 + i % 2] for i in range(64)})
    model = Model(model_of(name).transformer, tokenizer)
    for seed in range(3):
        arguments = {"max_tokens": 15, "temperature": 1.5, "seed": seed, "logprobs": 2, "stop": stop}
        whole = model.generate(prompts()[2], **arguments)
        stream = model.stream(prompts()[2], **arguments)
        pieces = list(stream)
        assert "".join(pieces) == whole.text
        assert "" not in pieces
        assert stream.result == whole


# ── the end of the positions ─────────────────────────────────────────────────────────────────────────────────


def test_generation_ends_with_the_table() -> None:
    """Case K06. The last token is only predicted, never read, so a text may grow one past the table."""
    model = Model(tiny.transformer({**tiny.config("gpt2"), "n_positions": 16}))
    ids = tiny.ids(17).tolist()
    for asked, produced in ((6, 6), (7, 7), (8, 7), (100, 7), (None, 7)):
        result = model.generate(ids[:10], max_tokens=asked, temperature=0)
        assert (len(result.tokens), result.finish_reason) == (produced, "length")
    assert len(model.generate(ids[:16], max_tokens=100, temperature=0).tokens) == 1
    for call in (model.generate, model.logits, model.hidden, model.score, lambda text: model.trace(text, "logits")):
        with pytest.raises(ContextExceeded, match="17"):
            call(ids)
    with pytest.raises(ContextExceeded):
        model.trace(ids[:10], "logits", max_tokens=7)
    # In a batch each row has its own room.
    both = model.generate([ids[:10], ids[:15]], max_tokens=100, temperature=0)
    assert [len(result.tokens) for result in both] == [7, 2]


@pytest.mark.parametrize("how", ["generate", "logits", "score", "trace"])
def test_past_the_trained_length_there_is_one_warning(how: str) -> None:
    model = Model(tiny.transformer({**tiny.config("llama"), "max_position_embeddings": 16}))
    ids = tiny.ids(20).tolist()
    calls = {
        "generate": lambda: model.generate(ids[:14], max_tokens=6, temperature=0),
        "logits": lambda: model.logits(ids),
        "score": lambda: model.score(ids),
        "trace": lambda: model.trace(ids[:14], "logits", max_tokens=6),
    }
    with pytest.warns(UserWarning, match="more than the 16") as caught:
        calls[how]()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls.values():
            call()
    assert len(model.generate(ids[:14], max_tokens=None, temperature=0).tokens) == 3


# ── two at once ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", families("gemma3"))
def test_two_threads_on_one_model(name: str) -> None:
    model = model_of(name)
    wanted = [model.generate(prompts(), max_tokens=MORE, temperature=1.0, seed=seed, logprobs=2) for seed in range(2)]
    got: list[list[Any]] = [[], []]
    start = threading.Barrier(2)

    def work(seed: int) -> None:
        start.wait()
        for _ in range(2):
            got[seed].append(model.generate(prompts(), max_tokens=MORE, temperature=1.0, seed=seed, logprobs=2))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(2):
        assert got[seed] == [wanted[seed]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.CASES)
def test_batches_of_every_option(name: str) -> None:
    model = Model(tiny.transformer(name))
    chance = random.Random(name)
    ties = rows = 0
    for seed in range(4):
        texts = [tiny.ids(chance.randint(1, 40), seed=seed * 10 + i).tolist() for i in range(chance.randint(2, 8))]
        for temperature in (0.0, 1.0):
            together = model.generate(texts, max_tokens=20, temperature=temperature, seed=seed)
            for prompt, result in zip(texts, together, strict=True):
                alone = model.generate(prompt, max_tokens=20, temperature=temperature, seed=seed)
                ties += same(model, prompt, result, alone, seed if temperature else None)
                rows += 1
    assert ties <= rows // 50 + 1
