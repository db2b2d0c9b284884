"""Beam search against transformers' own, sequence by sequence and score by score."""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cutaway
from cutaway.cache import build
from cutaway.errors import RequestError
from cutaway.generation.beam import Beam, Hunt, beam_search
from cutaway.generation.generate import Generation, Run
from cutaway.generation.params import resolve
from cutaway.model import Model
from cutaway.spec import GenerationSettings
from tests.generation.scripted import VOCAB, Bytes, Scripted
from tests.generation.sweep import families
from tests.reference import oracle, tiny

NEAR_TIE = 1e-3
TOLERANCE = 1e-4
ROOM = 9
LENGTHS = (1, 2, 5, 9, 14)
ENDS = (55, 12)  # tokens that these models like well enough
Answers = list[tuple[list[int], float]]


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of window + 4, so that these texts go round them."""
    monkeypatch.setattr(build, "SLACK", 4)


@pytest.fixture(scope="module", autouse=True)
def capped_oracle() -> Any:
    """Gemma 3's caps and MPT's scales: the settings change nothing in all other cases."""
    with pytest.MonkeyPatch.context() as patch:
        oracle.use_attention_cap(patch)
        oracle.use_mpt_settings(patch)
        yield


@functools.cache
def both(name: str) -> tuple[Model, Any]:
    """Ours and theirs, of one folder."""
    with tempfile.TemporaryDirectory() as made:
        folder = tiny.write(tiny.config(name), Path(made) / "model")
        return cutaway.load(folder), oracle.fresh(folder)


def fifty() -> list[list[int]]:
    return [tiny.ids(n, seed=seed).tolist() for n in LENGTHS for seed in range(10)]


def ours(model: Model, prompts: Sequence[list[int]], own: dict[str, Any], **arguments: Any) -> list[Answers]:
    """Answers to each prompt, all searched for together."""
    asked = Model(model.transformer, None, GenerationSettings(**{"eos_ids": ENDS, **own}))
    n = arguments["num_beams"]
    found = asked.generate(list(prompts), **{"max_tokens": ROOM, "n": n, **arguments})
    answers = [(one.tokens, one.score) for one in found]
    return [answers[i : i + n] for i in range(0, len(answers), n)]


def theirs(hf: Any, prompts: Sequence[list[int]], **options: Any) -> list[Answers]:
    """Answers to each prompt; those of one length are searched for together, so that nothing is padded."""
    options = {"max_new_tokens": ROOM, "eos_token_id": list(ENDS), "pad_token_id": 0, **options}
    ends, n = set(options["eos_token_id"]), options["num_beams"]
    groups: dict[int, list[int]] = defaultdict(list)
    for place, prompt in enumerate(prompts):
        groups[len(prompt)].append(place)
    found: list[Answers] = [[] for _ in prompts]
    for length, places in groups.items():
        out = hf.generate(
            torch.tensor([prompts[place] for place in places]), do_sample=False, num_return_sequences=n,
            return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
        for i, (row, score) in enumerate(zip(out.sequences[:, length:].tolist(), out.sequences_scores, strict=True)):
            last = next((j for j, token in enumerate(row) if token in ends), options["max_new_tokens"] - 1)
            found[places[i // n]].append((row[: last + 1], float(score)))
    return found


def compare(one: Sequence[Answers], other: Sequence[Answers], penalty: float = 1.0) -> tuple[int, float]:
    """The house's rule, for whole answers. Gives the near-ties, and the largest difference of scores.

    A negative penalty multiplies by the length, and differences with it: they are taken before that.
    """
    ties, worst = 0, 0.0
    for place, (mine, wanted) in enumerate(zip(one, other, strict=True)):
        assert len(mine) == len(wanted)
        for (a, s), (b, t) in zip(mine, wanted, strict=True):
            if a != b:
                assert abs(s - t) < NEAR_TIE, (place, mine, wanted)
                print(f"near-tie in prompt {place}: {a} {s:.6f}, {b} {t:.6f}")
                ties += 1
            else:
                worst = max(worst, abs(s - t) * min(1.0, len(a) ** penalty))
    assert worst <= TOLERANCE
    return ties, worst


def the_same(name: str, own: dict[str, Any], arguments: dict[str, Any], options: dict[str, Any]) -> list[Answers]:
    """Fifty prompts through both; ``own`` and ``arguments`` say to us what ``options`` say to them."""
    model, hf = both(name)
    prompts = fifty()
    mine = ours(model, prompts, own, **arguments)
    ties, worst = compare(mine, theirs(hf, prompts, **options), arguments.get("length_penalty", 1.0))
    ended = sum(answer[0][-1] in own.get("eos_ids", ENDS) for answers in mine for answer in answers)
    total = sum(map(len, mine))
    print(f"{name} {own} {arguments}: {ended}/{total} ended, {ties} near-ties, scores {worst:.1e}")
    assert ties <= total // 100
    return mine


GRID = [*itertools.product((2, 4), (0.0, 1.0, 2.0, -1.0), (False, True, "never"))]
# With four beams all of it, with two a part.
OFTEN = [one if one[0] == 4 or one[1] == 1 else pytest.param(*one, marks=pytest.mark.slow) for one in GRID]


@pytest.mark.parametrize(("beams", "penalty", "early"), OFTEN)
def test_beams_penalties_and_ends(beams: int, penalty: float, early: bool | str) -> None:
    asked = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
    mine = the_same("llama", {}, asked, asked)
    lengths = {len(answer[0]) for answers in mine for answer in answers}
    ended = [answer[0][-1] in ENDS for answers in mine for answer in answers]
    if penalty < 2 or early is True:  # otherwise length pays so much that hardly any answer ends
        assert len(lengths) > 3
        assert sum(ended) > 0.2 * len(ended)


RULES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: (the checkpoint's own, the call's arguments, transformers' words)
    "min-length": ({"min_length": 10}, {}, {"min_length": 10}),
    "min-tokens": ({}, {"min_tokens": 5}, {"min_new_tokens": 5}),
    "least-is-most": ({}, {"min_tokens": ROOM}, {"min_new_tokens": ROOM}),
    "ngram-1": ({}, {"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
    "ngram-2": ({"no_repeat_ngram_size": 2}, {}, {"no_repeat_ngram_size": 2}),
    "ngram-3": ({}, {"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
    "bad-words": ({}, {"bad_words": [17, [48, 55], [29, 12]]}, {"bad_words_ids": [[17], [48, 55], [29, 12]]}),
    "forced-first": ({"forced_bos_id": 33}, {}, {"forced_bos_token_id": 33}),
    "forced-last": ({"forced_eos_ids": (12,)}, {}, {"forced_eos_token_id": 12}),
    "forced-last-is-no-end": ({"forced_eos_ids": (9,)}, {}, {"forced_eos_token_id": 9}),
    "suppress": ({"suppress_ids": (17, 12)}, {}, {"suppress_tokens": [17, 12]}),
    "begin-suppress": ({"begin_suppress_ids": (17, 55, 19)}, {}, {"begin_suppress_tokens": [17, 55, 19]}),
    "repetition": ({"repetition_penalty": 1.5}, {}, {"repetition_penalty": 1.5}),
    "renormalize": (
        {"renormalize": True, "suppress_ids": (17, 48)}, {}, {"renormalize_logits": True, "suppress_tokens": [17, 48]},
    ),
    "one-end": ({"eos_ids": (19,)}, {}, {"eos_token_id": [19]}),
    "many-ends": ({"eos_ids": (1, 12, 17, 55)}, {}, {"eos_token_id": [1, 12, 17, 55]}),
    "one-token": ({}, {"max_tokens": 1}, {"max_new_tokens": 1}),
    "more-beams": ({}, {"num_beams": 7}, {"num_beams": 7}),
}  # fmt: skip
EVERY = (
    {"forced_bos_id": 33, "forced_eos_ids": (12,), "suppress_ids": (17,), "begin_suppress_ids": (19, 55),
     "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_length": 4, "renormalize": True},
    {"bad_words": [[48, 29], 41]},
    {"forced_bos_token_id": 33, "forced_eos_token_id": 12, "suppress_tokens": [17], "begin_suppress_tokens": [19, 55],
     "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_length": 4, "renormalize_logits": True,
     "bad_words_ids": [[48, 29], [41]]},
)  # fmt: skip
RULES["every"] = EVERY


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    own, arguments, options = RULES[rule]
    four: dict[str, Any] = {"num_beams": 4}
    mine = the_same("llama", own, four | arguments, four | options)
    if rule not in ("one-token", "more-beams"):  # the rule makes a difference
        assert mine != ours(both("llama")[0], fifty(), {}, num_beams=4)


@pytest.mark.parametrize("name", families("mistral-window", "gpt2"))
def test_families(name: str) -> None:
    """Learned positions, and caches that go round: what is reordered is all that a beam remembers."""
    asked = {"num_beams": 3, "length_penalty": 1.5, "early_stopping": "never"}
    own, arguments, options = EVERY
    the_same(name, {}, asked, asked)
    the_same(name, own, asked | arguments, asked | options)


@pytest.mark.slow
@pytest.mark.parametrize(("beams", "penalty", "early"), GRID)
def test_prompt_by_prompt(beams: int, penalty: float, early: bool | str) -> None:
    """As the first test, with longer answers, and nobody else in transformers' batch."""
    model, hf = both("llama")
    asked = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
    together = ours(model, fifty(), {}, max_tokens=20, **asked)
    alone = [theirs(hf, [prompt], max_new_tokens=20, **asked)[0] for prompt in fifty()]
    ties, worst = compare(together, alone, penalty)
    print(f"{asked}: {ties} near-ties, scores {worst:.1e}")
    assert ties <= 2


# ── against nothing but the definition ───────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_beams_enough_for_all_find_the_best_of_all() -> None:
    """Five tokens, three places: with 125 beams nothing is left out, so the best is that of an exhaustive search."""
    model, _ = both("llama")
    few, end = (17, 48, 29, 41, 12), 12
    own = {"suppress_ids": tuple(set(range(64)) - set(few)), "eos_ids": (end,)}
    for penalty in (0.0, 1.0, -1.0):
        prompt = tiny.ids(4, seed=3).tolist()
        found = ours(model, [prompt], own, num_beams=125, n=4, max_tokens=3, length_penalty=penalty)
        every = {}
        for tokens in itertools.product(few, repeat=3):
            answer = tokens[: tokens.index(end) + 1] if end in tokens else tokens
            logits = model.transformer(torch.tensor([[*prompt, *answer]]))[0].log_softmax(-1)
            total = sum(float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))
            every[answer] = total / len(answer) ** penalty
        best = sorted(every.items(), key=lambda one: -one[1])[:4]
        # "4 of 125" come in one list: ours() cuts by num_beams.
        assert [tokens for tokens, _ in found[0][:4]] == [list(tokens) for tokens, _ in best]
        assert [score for _, score in found[0][:4]] == pytest.approx([score for _, score in best], abs=1e-4)


# ── one search, however it is asked for ──────────────────────────────────────────────────────────────────────


def test_together_as_alone() -> None:
    """Prompts of many lengths in one batch: neither order nor company matters."""
    model, _ = both("mistral-window")
    prompts = [tiny.ids(n, seed=n).tolist() for n in (1, 40, 7, 23, 2)]
    own: dict[str, Any] = {"no_repeat_ngram_size": 2, "min_length": 9, "forced_bos_id": 20, "forced_eos_ids": (12,)}
    for early in (False, True):
        together = ours(model, prompts, own, num_beams=4, max_tokens=12, early_stopping=early)
        alone = [ours(model, [one], own, num_beams=4, max_tokens=12, early_stopping=early)[0] for one in prompts]
        assert compare(together, alone)[0] == 0


def test_n_best_of_more_beams() -> None:
    model, _ = both("llama")
    every = ours(model, fifty()[:7], {}, num_beams=4)
    asked = Model(model.transformer, None, GenerationSettings(eos_ids=ENDS, num_beams=4))
    for n in (1, 2, 4):
        found = asked.generate(fifty()[:7], max_tokens=ROOM, n=n)
        assert [one.choice for one in found] == [*range(n)] * 7
        assert [one.tokens for one in found] == [tokens for answers in every for tokens, _ in answers[:n]]


def test_a_result_says_all_that_it_did_before() -> None:
    model, _ = both("llama")
    tokenizer: Any = Bytes({i: "abc🙂".encode()[i % 7 : i % 7 + 1 + i % 2] for i in range(64)})
    asked = Model(model.transformer, tokenizer, GenerationSettings(eos_ids=ENDS))
    reasons = set()
    for prompt in fifty()[::7]:
        found = asked.generate(prompt, max_tokens=ROOM, num_beams=3, n=3, logprobs=2, length_penalty=2.0)
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        for one in found:
            reasons.add(one.finish_reason)
            assert one.finish_reason == ("stop" if one.tokens[-1] in ENDS else "length")
            assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (len(prompt), len(one.tokens))
            assert one.score == pytest.approx(_total(one) / len(one.tokens) ** 2, abs=1e-5)
            scored = asked.score(prompt + one.tokens).logprobs[len(prompt) :]
            assert [entry.logprob for entry in one.logprobs or []] == pytest.approx(scored, abs=1e-4)
            assert all(len(entry.top) == 2 for entry in one.logprobs or [])
        stream = asked.stream(prompt, max_tokens=ROOM, num_beams=3, logprobs=2, length_penalty=2.0)
        pieces = list(stream)
        assert ("".join(pieces), stream.result) == (found[0].text, found[0])
    assert reasons == {"stop", "length"}
    assert asked.generate(fifty()[0], max_tokens=3).score is None
    nothing = asked.generate(fifty()[0], max_tokens=0, num_beams=2)
    assert (nothing.tokens, nothing.finish_reason, nothing.score) == ([], "length", None)


def _total(one: Generation) -> float:
    assert one.logprobs is not None
    assert [entry.token for entry in one.logprobs] == one.tokens
    return sum(entry.logprob for entry in one.logprobs)


def test_the_table_of_positions_ends_beams() -> None:
    model = Model(tiny.transformer({**tiny.config("gpt2"), "n_positions": 16}))
    found = model.generate([tiny.ids(n).tolist() for n in (10, 15, 16)], max_tokens=100, num_beams=2)
    assert [len(one.tokens) for one in found] == [7, 2, 1]


def test_forbidden_and_forced_until_nothing_is_left() -> None:
    model, _ = both("llama")
    prompt = fifty()[0]
    for own, n, field in (
        ({"suppress_ids": tuple(range(64))}, 1, "n"),
        ({"suppress_ids": tuple(range(62)), "eos_ids": (1,)}, 3, "n"),
    ):
        with pytest.raises(RequestError, match="fewer answers") as caught:
            ours(model, [prompt], own, num_beams=4, n=n, max_tokens=1)
        assert caught.value.field == field
    assert len(ours(model, [prompt], {"forced_bos_id": 4}, num_beams=4, n=1, max_tokens=1)) == 1


def test_bad_logits_end_the_search_with_an_error() -> None:
    stub: Any = Scripted([1])
    stub.unembed = lambda x, tap=None: torch.full((len(x), 1, VOCAB), float("nan"))
    plain: Any = Scripted([1])
    for model, arguments, match in ((stub, {}, "NaN or infinity"), (plain, {"logit_bias": {0: 1e39}}, "so large")):
        with pytest.raises(RequestError, match=match):
            list(Run(model, None, [[7, 8, 9]], resolve(GenerationSettings(), VOCAB, num_beams=2, **arguments)))


@pytest.mark.parametrize("early", [False, True, "never"])
def test_when_it_is_over(early: bool | str) -> None:
    """Every state of a search, by chance, is over here when it is in transformers."""
    from transformers.generation.utils import GenerationMixin as Theirs

    chance, seen = random.Random(0), set()
    for _ in range(2000):
        penalty, room = chance.choice([0.0, 0.5, 2.0, -0.5, -1.0]), chance.randint(2, 9)
        length, full = chance.randint(1, room - 1), chance.random() < 0.8
        running, finished = chance.uniform(-6, -1), sorted((chance.uniform(-8, 0) for _ in range(2)), reverse=True)
        done = [Beam([0], score) for score in finished][: 2 if full else 1]
        hunt = Hunt(0, [3, 4, 5], room, [Beam([0] * length, running)], done)
        sampling = resolve(GenerationSettings(), VOCAB, num_beams=2, length_penalty=penalty, early_stopping=early)
        sent = torch.tensor([[True, full]])
        improvable = Theirs._check_early_stop_heuristic(
            torch.tensor([[True]]), torch.tensor([[running, -1e9]]),
            torch.tensor([[finished[0], finished[1] if full else -1e9]]), sent, 3 + length, 3 + room, 3, early, penalty,
        )  # fmt: skip
        goes_on = Theirs._beam_search_has_unfinished_sequences(improvable, sent, torch.tensor([[False]]), early)
        assert hunt.done(sampling) == (not bool(goes_on)), (penalty, room, length, running, finished, full)
        seen.add((full, bool(goes_on)))
    assert seen == ({(False, True), (True, False)} if early is True else {(False, True), (True, False), (True, True)})


# ── encoder–decoders ─────────────────────────────────────────────────────────────────────────────────────────


class Lent:
    """A session whose decoder is transformers' BART: a row's source goes with it, as a cache's entries will."""

    def __init__(self, hf: Any, sources: Tensor) -> None:
        self.hf = hf
        self.sources = hf.get_encoder()(sources).last_hidden_state
        self.tokens: list[list[int]] = [[] for _ in sources]

    @torch.no_grad()
    def feed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        self.tokens = [[*held, *new] for held, new in zip(self.tokens, rows, strict=True)]
        out: Tensor = self.hf(decoder_input_ids=torch.tensor(self.tokens), encoder_outputs=(self.sources,)).logits
        return out[:, -1]

    def select(self, rows: Sequence[int]) -> None:
        self.sources = self.sources[list(rows)]
        self.tokens = [self.tokens[row] for row in rows]


@functools.cache
def bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, dropout=0.0,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    tiny.scale_randomly(model, norm_mean=1.0)
    return model


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("early", [False, True, "never"])
def test_a_start_token_is_a_prompt_of_one(penalty: float, early: bool | str) -> None:
    """What BART's checkpoints ask for, with its start token that is its end token too."""
    hf = bart()
    sources = tiny.ids(10, 7)
    ends = (2, 17, 40)
    own = GenerationSettings(
        eos_ids=ends, num_beams=4, length_penalty=penalty, early_stopping=early, max_length=12, min_length=5,
        no_repeat_ngram_size=3, forced_bos_id=0, forced_eos_ids=(2,), begin_suppress_ids=(33, 34), decoder_start_id=2,
    )  # fmt: skip
    session: Any = Lent(hf, sources)
    sampling = resolve(own, 64, n=4)
    found = dict(beam_search(session, session.feed([[2]] * 10), [[2]] * 10, [11] * 10, sampling))
    out = hf.generate(
        sources, do_sample=False, num_beams=4, num_return_sequences=4, length_penalty=penalty, early_stopping=early,
        max_length=12, min_length=5, no_repeat_ngram_size=3, forced_bos_token_id=0, forced_eos_token_id=2,
        begin_suppress_tokens=[33, 34], eos_token_id=list(ends), return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    wanted: list[Answers] = [[] for _ in sources]
    for i, (row, score) in enumerate(zip(out.sequences[:, 1:].tolist(), out.sequences_scores, strict=True)):
        last = next(j for j, token in enumerate(row) if token in ends)
        wanted[i // 4].append((row[: last + 1], float(score)))
    mine = [[(beam.tokens, beam.score) for beam in found[i]] for i in range(10)]
    ties, worst = compare(mine, wanted, penalty)
    print(f"penalty {penalty}, early {early}: {ties} near-ties, scores {worst:.1e}")
    assert ties == 0
    assert penalty == 2 or len({len(tokens) for answers in mine for tokens, _ in answers}) > 2
