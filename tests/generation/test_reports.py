"""What is told beside the text: log-probabilities raw, processed and of the prompt; usage; times."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import cutaway
from cutaway.errors import RequestError
from cutaway.generation import generate as loop
from cutaway.generation import logprobs, passes, row
from cutaway.generation.logprobs import TokenLogprob
from cutaway.generation.result import Timing, Usage
from cutaway.model import Model
from tests.cli.conftest import config, write_folder
from tests.generation.scripted import say
from tests.models.test_long import Largest
from tests.reference import tiny, tiny_seq2seq

PROMPT = tiny.ids(5, seed=3).tolist()
PROMPTS = [tiny.ids(n, seed=n).tolist() for n in (5, 1, 23, 12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tiny.config("llama"), tmp_path_factory.mktemp("reports") / "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return cutaway.load(folder)


@pytest.fixture(scope="module")
def hf(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def reference(hf: Any, ids: Sequence[int]) -> Tensor:
    """log-softmax(logits[t]) by transformers. [n, vocab]"""
    return hf(torch.tensor([list(ids)])).logits[0].log_softmax(-1)


def agrees(entries: Sequence[TokenLogprob | None], wanted: Tensor, tokens: Sequence[int], top: int) -> None:
    """Entry t is of token t, under row t of what is wanted."""
    assert len(entries) == len(tokens)
    for entry, scores, token in zip(entries, wanted, tokens, strict=True):
        assert entry is not None
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(scores[token]), abs=1e-4)
        best = scores.topk(min(top, int((scores > -math.inf).sum())))
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert all(p <= 0 for _, p in entry.top)
        assert sum(math.exp(p) for _, p in entry.top) <= 1 + 1e-5


# ── the prompt ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("top", [0, 1, 3])
def test_s12_logprobs_of_the_prompt(model: Model, hf: Any, max_tokens: int, top: int) -> None:
    """Case S12: five entries and one for each new token; the first says nothing; entry t is under logits[t-1]."""
    result = model.generate(PROMPT, max_tokens=max_tokens, temperature=0, logprobs=top, prompt_logprobs=top)
    assert result.prompt_logprobs is not None
    assert result.logprobs is not None
    assert result.prompt_logprobs[0] is None
    entries = [*result.prompt_logprobs, *result.logprobs]
    tokens = PROMPT + result.tokens
    assert len(entries) == len(tokens) == 5 + max_tokens
    agrees(entries[1:], reference(hf, tokens)[:-1], tokens[1:], top)
    if not max_tokens and top == 0:
        shifted = [entry.logprob for entry in entries[1:] if entry is not None]
        wrong = reference(hf, PROMPT)[1:].gather(1, torch.tensor(PROMPT)[1:, None])[:, 0].tolist()
        assert max(abs(a - b) for a, b in zip(shifted, wrong, strict=True)) > 0.1  # or the case would show nothing


def test_only_when_asked(model: Model) -> None:
    result = model.generate(PROMPT, max_tokens=2)
    assert (result.logprobs, result.prompt_logprobs, result.processed_logprobs) == (None, None, None)
    for name in ("prompt_logprobs", "processed_logprobs"):
        with pytest.raises(RequestError) as caught:
            model.generate(PROMPT, **{name: -1})
        assert caught.value.field == name


@pytest.mark.parametrize("how", [{"n": 2, "temperature": 1.0, "seed": 4}, {"num_beams": 3, "n": 2}, {}])
def test_of_every_prompt_of_a_batch(model: Model, hf: Any, how: dict[str, Any], monkeypatch: Any) -> None:
    """Ragged, in pieces that fall anywhere, with several answers each, by beams."""
    monkeypatch.setattr(passes, "CHUNK", 5)
    monkeypatch.setattr(logprobs, "LARGEST", 3 * 64)
    found = model.generate(PROMPTS, max_tokens=3, prompt_logprobs=2, **how)
    n = how.get("n", 1)
    assert len(found) == n * len(PROMPTS)
    for i, result in enumerate(found):
        prompt = PROMPTS[i // n]
        assert result.prompt_logprobs[0] is None
        agrees(result.prompt_logprobs[1:], reference(hf, prompt)[:-1], prompt[1:], 2)


def test_the_same_bits_as_score(model: Model) -> None:
    """``deterministic``: alone, in a batch, in any pieces, and scored in one pass; and without it there are others."""

    def bits(entries: Sequence[TokenLogprob | None]) -> list[bytes]:
        return [struct.pack("<d", entry.logprob) for entry in entries if entry is not None]

    differ = 0
    for deterministic in (True, False):
        model.transformer.use_kernels(deterministic)  # whose sums know no company in any case
        how = {"max_tokens": 0, "prompt_logprobs": 0, "deterministic": deterministic}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes, "CHUNK", 4)
            patch.setattr(logprobs, "LARGEST", 7 * 64)
            found = model.generate(PROMPTS, **how)
        for prompt, result in zip(PROMPTS, found, strict=True):
            alone = model.generate(prompt, **how)
            scored = model.score(prompt, deterministic=deterministic).logprobs[1:]
            same = bits(result.prompt_logprobs) == bits(alone.prompt_logprobs) == [struct.pack("<d", x) for x in scored]
            assert same or not deterministic
            differ += not same
    model.transformer.use_kernels()
    assert differ


def test_score_with_alternatives(model: Model, hf: Any) -> None:
    plain, found = model.score(PROMPT), model.score(PROMPT, top=4)
    assert plain.top is None
    assert (found.tokens, found.logprobs) == (plain.tokens, plain.logprobs)
    assert found.top is not None
    assert found.top[0] == ()
    entries = [
        TokenLogprob(t, p, b) for t, p, b in zip(PROMPT, found.logprobs, found.top, strict=True) if p is not None
    ]
    agrees(entries, reference(hf, PROMPT)[:-1], PROMPT[1:], 4)
    with pytest.raises(RequestError, match="top"):
        model.score(PROMPT, top=-1)


def test_of_an_encoder_decoder(tmp_path: Path) -> None:
    """Nothing predicts a source; a target is scored, with alternatives."""
    model = cutaway.load(tiny_seq2seq.write(tiny_seq2seq.config("t5"), tmp_path / "t5"))
    with pytest.raises(RequestError, match="a source is not predicted") as caught:
        model.generate(PROMPT, prompt_logprobs=0)
    assert caught.value.field == "prompt_logprobs"
    assert "model.score" in (caught.value.hint or "")
    found = model.score(PROMPT, target=[7, 8], top=2)
    assert found.top is not None
    assert [len(best) for best in found.top] == [2, 2]


def test_no_table_of_a_prompt_by_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation makes a number for each token and each entry of the vocabulary; a larger limit would."""
    model = cutaway.build({"d_model": 8, "n_heads": 1, "layers": 1, "vocab_size": 3000})
    model.transformer.warned_length = True
    prompt = list(range(3000))

    def largest(most: int) -> int:
        monkeypatch.setattr(logprobs, "LARGEST", most)
        with Largest() as seen:
            model.generate(prompt, max_tokens=0, prompt_logprobs=2)
            model.score(prompt)
        return seen.numel

    assert largest(3000 * 64) < 3000 * 3000 / 4
    assert largest(1 << 40) >= 2999 * 3000


# ── raw and processed ────────────────────────────────────────────────────────────────────────────────────────

DRAWN = (
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
)
GREEDY = ({}, {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}, {"repetition_penalty": 0.6})


@pytest.mark.parametrize("how", [*DRAWN, *GREEDY], ids=str)
def test_against_transformers(model: Model, hf: Any, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``output_scores`` are processed, its ``output_logits`` are raw; a draw of theirs takes our tokens."""
    n, top = 12, 64
    how = {"temperature": 0.0, **how}
    mine = model.generate(PROMPT, max_tokens=n, seed=3, logprobs=top, processed_logprobs=top, **how)
    drawn = iter(mine.tokens)
    monkeypatch.setattr(torch, "multinomial", lambda *_, **__: torch.tensor([[next(drawn)]]))
    theirs = {key: value for key, value in how.items() if value}
    out = hf.generate(
        torch.tensor([PROMPT]), max_new_tokens=n, do_sample=how["temperature"] > 0, return_dict_in_generate=True,
        output_scores=True, output_logits=True, eos_token_id=None, pad_token_id=0,
        **({"top_k": 0} if how["temperature"] else {}) | theirs,
    )  # fmt: skip
    assert out.sequences[0, len(PROMPT) :].tolist() == mine.tokens
    agrees(mine.logprobs, torch.cat(out.logits).log_softmax(-1), mine.tokens, top)
    agrees(mine.processed_logprobs, torch.cat(out.scores).log_softmax(-1), mine.tokens, top)


def test_s07_filters_leave_the_raw_ones_alone(model: Model) -> None:
    """Case S07, of whole answers: what is raw does not know of the filters, what is processed adds up to one."""
    how = {"max_tokens": 6, "seed": 1, "logprobs": 64, "processed_logprobs": 64}
    one = model.generate(PROMPT, temperature=1e-9, top_k=1, min_p=0.5, **how)
    other = model.generate(PROMPT, temperature=0, **how)
    assert one.tokens == other.tokens
    assert one.logprobs == other.logprobs
    assert [entry.top for entry in one.processed_logprobs] == [((token, 0.0),) for token in one.tokens]
    kept = model.generate(PROMPT, temperature=2.0, top_k=5, **how)
    for entry in kept.processed_logprobs:
        assert len(entry.top) == 5
        assert sum(math.exp(p) for _, p in entry.top) == pytest.approx(1, abs=1e-5)


def test_a_bias_and_forbidden_words(model: Model, hf: Any) -> None:
    """By hand: what a bias adds, what is forbidden is not there."""
    result = model.generate(
        PROMPT, max_tokens=1, temperature=0, logit_bias={9: 3.0, 11: -2.0}, bad_words=[4, 5], processed_logprobs=64
    )
    with torch.no_grad():
        wanted = hf(torch.tensor([PROMPT])).logits[0, -1]
    wanted[9] += 3
    wanted[11] -= 2
    wanted[[4, 5]] = -math.inf
    agrees(result.processed_logprobs, wanted.log_softmax(-1)[None], result.tokens, 64)


def test_beams_are_sums_of_what_is_processed(model: Model) -> None:
    """An answer's score is its processed log-probabilities over length ** penalty; transformers adds up the same."""
    how = {"num_beams": 4, "n": 4, "length_penalty": 0.7, "repetition_penalty": 1.5, "max_tokens": 9}
    for result in model.generate(PROMPT, processed_logprobs=2, logprobs=2, **how):
        total = sum(entry.logprob for entry in result.processed_logprobs)
        assert result.score == pytest.approx(total / len(result.tokens) ** 0.7, abs=1e-5)
        assert [entry.token for entry in result.processed_logprobs] == result.tokens
        assert [entry.token for entry in result.logprobs] == result.tokens
        assert [entry.logprob for entry in result.logprobs] != [entry.logprob for entry in result.processed_logprobs]


def test_a_form_is_among_what_changes_them(folder: Path) -> None:
    from tests.test_model import tokenizer_json

    tokenizer_json(folder)
    talking = cutaway.load(folder)
    result = talking.generate("a", choices=["b", "c"], temperature=1.0, seed=0, processed_logprobs=64, logprobs=64)
    assert talking.tokenizer is not None
    allowed = {token for word in "bc" for token in talking.tokenizer.encode(word, continuation=True)}
    assert {token for token, _ in result.processed_logprobs[0].top} == allowed
    assert len(result.logprobs[0].top) == 64


# ── usage ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_v05_a_prompt_counts_once(model: Model) -> None:
    """Case V05: five tokens, three answers of at most four, then several prompts."""
    found = model.generate(PROMPT, n=3, max_tokens=4, temperature=1.0, seed=0)
    assert [one.choice for one in found] == [0, 1, 2]
    assert all(one.usage.prompt_tokens == 5 for one in found)
    assert Usage.of(found) == Usage(5, sum(len(one.tokens) for one in found))
    assert len({tuple(one.tokens) for one in found}) == 3  # independent draws
    for choice, one in enumerate(found):  # and the first two of three are those of two
        if choice < 2:
            assert model.generate(PROMPT, n=2, max_tokens=4, temperature=1.0, seed=0)[choice] == one
    several = model.generate(PROMPTS, n=2, max_tokens=4, temperature=1.0, seed=0)
    assert Usage.of(several).prompt_tokens == sum(map(len, PROMPTS))
    assert Usage.of(several).total_tokens == sum(map(len, PROMPTS)) + sum(len(one.tokens) for one in several)
    assert Usage.of([]) == Usage(0, 0)


def test_v04_how_long_an_answer_may_be(model: Model) -> None:
    """Case V04: left out, None, 0, 1, beyond the context, and what is no length; the reason is ``length`` when cut."""
    endless = {"temperature": 1.0, "seed": 0, "logit_bias": dict.fromkeys(model.settings.eos_ids, -100.0)}
    assert model.spec.max_positions == 64
    model.transformer.warned_length = True
    for asked, length in (({}, 256), ({"max_tokens": 0}, 0), ({"max_tokens": 1}, 1)):
        result = model.generate(PROMPT, **endless, **asked)
        assert (len(result.tokens), result.finish_reason) == (length, "length")
    # None: as many as there are positions, the last of which is predicted and not read.
    assert len(model.generate(PROMPT, max_tokens=None, **endless).tokens) == 64 - 5 + 1
    for wrong in (-1, 1.5, "many", True):
        with pytest.raises(RequestError) as caught:
            model.generate(PROMPT, max_tokens=wrong)
        assert caught.value.field == "max_tokens"
    with pytest.raises(RequestError) as caught:
        model.generate(PROMPT, max_completion_tokens=3)
    assert (caught.value.field, caught.value.hint) == ("max_completion_tokens", "Did you mean max_tokens?")


def test_v06_bytes_of_half_characters() -> None:
    """Case V06: each token's bytes, joined, are the answer's UTF-8: no U+FFFD although no token is a character."""
    text = "a🙂é"
    _, result = say(list(text.encode()), max_tokens=len(text.encode()), logprobs=3)
    assert result.text == text
    assert result.logprobs is not None
    assert bytes(entry.token for entry in result.logprobs) == text.encode()
    assert all(sum(math.exp(p) for _, p in entry.top) <= 1 for entry in result.logprobs)


def test_v06_bytes_of_a_vocabulary_of_bytes(tmp_path: Path) -> None:
    talking = cutaway.load(write_folder(tmp_path / "bytes", config()))
    assert talking.tokenizer is not None
    word = "🙂é"
    how = {"choices": [word], "logprobs": 3, "temperature": 0}
    whole, stream = talking.generate("a", **how), talking.stream("a", **how)
    pieces = "".join(stream)
    for result in (whole, stream.result):
        spelt = [talking.tokenizer.token_bytes(entry.token) for entry in result.logprobs]
        assert b"".join(spelt) == result.text.encode() == pieces.encode() == word.encode()
        assert any("\ufffd" in piece.decode("utf-8", "replace") for piece in spelt)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a second whenever it is read."""
    clock = itertools.count()
    for module in (loop, row):
        monkeypatch.setattr(module, "perf_counter", lambda: float(next(clock)))


@pytest.mark.usefixtures("ticks")
def test_times_of_one_answer(model: Model) -> None:
    """Read at 0, when the prompt is through, and at each token: the prompt takes 1, the first token comes at 2."""
    timing = model.generate(PROMPT, max_tokens=4, temperature=0, min_tokens=4).timing
    assert timing == Timing(prompt_s=1.0, first_token_s=2.0, total_s=5.0, prompt_tokens=5, tokens=4)
    assert (timing.decode_s, timing.prompt_tokens_per_s, timing.tokens_per_s) == (3.0, 5.0, 1.0)


@pytest.mark.usefixtures("ticks")
def test_times_where_there_is_little(model: Model) -> None:
    nothing = model.generate(PROMPT, max_tokens=0).timing
    assert nothing == Timing(None, None, 0.0, 5, 0)
    assert (nothing.decode_s, nothing.prompt_tokens_per_s, nothing.tokens_per_s) == (None, None, None)
    read = model.generate(PROMPT, max_tokens=0, prompt_logprobs=0).timing
    assert (read.prompt_s, read.total_s, read.decode_s) == (1.0, 1.0, None)
    one = model.generate(PROMPT, max_tokens=1).timing
    assert (one.first_token_s, one.total_s, one.decode_s, one.tokens_per_s) == (2.0, 2.0, 0.0, None)


@pytest.mark.usefixtures("ticks")
def test_times_of_a_batch_and_of_beams(model: Model) -> None:
    """Each answer has its own first and last token; the answers of a search come at its end."""
    one, two = model.generate([PROMPT, PROMPT], max_tokens=3, temperature=0, min_tokens=3)
    assert [t.timing.first_token_s for t in (one, two)] == [2.0, 3.0]
    assert [t.timing.total_s for t in (one, two)] == [6.0, 7.0]
    best = model.generate(PROMPT, num_beams=2, max_tokens=3).timing
    assert (best.prompt_s, best.first_token_s) == (1.0, None)
    assert best.decode_s == best.total_s - 1
    assert best.tokens_per_s == pytest.approx(best.tokens / best.decode_s)


def test_times_are_no_part_of_a_comparison(model: Model) -> None:
    one, two = (model.generate(PROMPT, max_tokens=3, temperature=0) for _ in range(2))
    assert one.timing != two.timing
    assert one == two
