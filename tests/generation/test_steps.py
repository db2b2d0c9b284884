"""The table of must show 1: every step from logits to a token × every kind of logits, against its reference.

A row is a step with one setting, a column a kind of logits. In each cell either what our step hands on is bit by bit
what the reference makes of the same logits (which tokens are kept, and their values), or the reference leaves a row
that no token can be chosen from (NaN, +inf, nothing but −inf) and ours is a RequestError. Settings that make no sense
at all (p = 1.1, NaN, k < 0) are errors before any logits are there: see ``test_arguments_that_make_no_sense``.

References: transformers' processors; llguidance's own mask; numpy where transformers has no such step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
import pytest
import torch
import transformers.generation.logits_process as hf
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation import logits as steps
from cutaway.generation.constrain import Constraint, Guides, mask
from cutaway.generation.params import Sampling, resolve
from cutaway.spec import GenerationSettings
from tests.generation.test_constrain import byte_level

ROWS, VOCAB, SEED = 4, 61, 11
ENDS = (2, 7)
NEVER = float("-inf")

# ── columns: kinds of logits ─────────────────────────────────────────────────────────────────────────────────


def noise(size: int, scale: float = 4.0) -> Tensor:
    return torch.randn(ROWS, size, generator=torch.Generator().manual_seed(size)) * scale


def with_one(value: float, size: int) -> Tensor:
    """One such number in one row; the others are as good as ever."""
    x = noise(size)
    x[1, size // 2] = value
    return x


def some_never(size: int) -> Tensor:
    x = noise(size)
    return x.masked_fill(noise(size, 1.0).roll(1, 0) > 0.5, NEVER)


def one_left(size: int) -> Tensor:
    x = torch.full((ROWS, size), NEVER)
    x[torch.arange(ROWS), torch.arange(ROWS) * 5 % size] = 0.5
    return x


def the_largest(size: int) -> Tensor:
    """Half of them the largest number, half its negative. Not 30: a tenth of 30 equals is a border of rounding."""
    most = torch.finfo(torch.float32).max
    return torch.where(noise(size).argsort(-1).argsort(-1) < min(29, size // 2), most, -most)


def none_left(size: int) -> Tensor:
    x = noise(size)
    x[2] = NEVER
    return x


COLUMNS: dict[str, Callable[[int], Tensor]] = {
    "spread": noise,
    "flat": lambda n: noise(n, 0.05),
    "ties": lambda n: noise(n, 1.0).round(),
    "all equal": lambda n: torch.full((ROWS, n), 2.5),
    "zeros": lambda n: torch.zeros(ROWS, n),
    "one token": lambda n: noise(1),
    "two tokens": lambda n: noise(2),
    "some -inf": some_never,
    "one not -inf": one_left,
    "all -inf": none_left,
    "NaN": partial(with_one, math.nan),
    "+inf": partial(with_one, math.inf),
    "1e30": lambda n: noise(n, 1e30),
    "the largest": the_largest,
    "the smallest": lambda n: noise(n, 1e-42),
    "fp16": lambda n: noise(n).half(),
    "bf16": lambda n: noise(n).bfloat16(),
}

# ── rows: steps with a setting ───────────────────────────────────────────────────────────────────────────────

Reference = Callable[[Tensor, Tensor], Tensor]  # ids [rows, n] and logits [rows, vocab] → logits


def untouched(ids: Tensor, x: Tensor) -> Tensor:
    return x


@dataclass
class Row:
    """Arguments of a call, settings of a checkpoint, and what the reference makes of logits under them."""

    theirs: Reference
    call: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    start: int = 3  # tokens of the prompt
    length: int = 9  # and of prompt and answer so far
    room: int = 20
    any_of_equals: bool = False  # the border may run through equals, of which the reference keeps whichever


def counted(frequency: float, presence: float) -> Reference:
    """The formula of OpenAI's API reference, over what was produced."""

    def apply(ids: Tensor, x: Tensor) -> Tensor:
        counts = np.stack([np.bincount(row, minlength=x.shape[1]) for row in ids[:, 3:].numpy()]).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            out = x.numpy() - np.float32(frequency) * counts - np.float32(presence) * (counts > 0)
        return torch.from_numpy(out)

    return apply


PLAIN = Row(untouched)


def table(vocab: int) -> dict[str, Row]:
    """Every step; of a small vocabulary, its own tokens."""

    def t(*ids: int) -> list[int]:
        return [token % vocab for token in ids]

    def biased(bias: Mapping[int, float]) -> Row:
        mine = {token % vocab: value for token, value in bias.items()}
        one = {(token,): value for token, value in mine.items()}
        return Row(lambda ids, x: hf.SequenceBiasLogitsProcessor(one)(ids, x), {"logit_bias": mine})

    ends = t(*ENDS)
    words = [t(9), t(3, 4), t(2), t(*[3] * 30)]
    rows: dict[str, Row] = {
        "no step": Row(untouched),
        "repetition_penalty=1.3, empty answer": Row(
            lambda ids, x: hf.RepetitionPenaltyLogitsProcessor(1.3)(ids, x), {"repetition_penalty": 1.3}, length=3
        ),
        "logit_bias": biased({0: -100.0, 5: 2.5, VOCAB - 1: 100.0}),
        "logit_bias, huge": biased({3: 1e30, 4: -1e30}),
        "logit_bias, past fp32": biased({3: 1e39}),
        "logit_bias, none": Row(untouched, {"logit_bias": {}}),
        "bad_words": Row(
            lambda ids, x: hf.NoBadWordsLogitsProcessor(words, list(ends))(ids, x),
            {"bad_words": words},
        ),
        "suppress_ids": Row(
            lambda ids, x: hf.SuppressTokensLogitsProcessor(t(4, 8))(ids, x), own={"suppress_ids": tuple(t(4, 8))}
        ),
    }
    for value in (0.5, 1.0, 1.3, 1e-6, 1e30):
        reference = hf.RepetitionPenaltyLogitsProcessor(value)
        rows[f"repetition_penalty={value}"] = Row(reference, {"repetition_penalty": value})
    for f, p in ((0.5, 0.0), (0.0, 0.25), (-1.5, 2.0), (0.0, 0.0), (1e30, 1e30), (1e39, 0.0), (0.0, 1e39)):
        rows[f"frequency={f}, presence={p}"] = Row(counted(f, p), {"frequency_penalty": f, "presence_penalty": p})
    for n in (1, 2, 9, 10, 50):
        rows[f"no_repeat_ngram_size={n}"] = Row(hf.NoRepeatNGramLogitsProcessor(n), {"no_repeat_ngram_size": n})
    for n in (0, 6, 7, 10**9):
        rows[f"min_tokens={n}"] = Row(hf.MinNewTokensLengthLogitsProcessor(3, n, ends), {"min_tokens": n})
    for n in (9, 10):
        rows[f"min_length={n}"] = Row(hf.MinLengthLogitsProcessor(n, ends), own={"min_length": n})
    for n in (1, 2):
        forced = Row(hf.ForcedBOSTokenLogitsProcessor(*t(5)), own={"forced_bos_id": t(5)[0]}, start=1, length=n)
        rows[f"forced_bos_id, text of {n}"] = forced
    for left in (1, 2):
        reference = hf.ForcedEOSTokenLogitsProcessor(9 + left, ends)
        rows[f"forced_eos_ids, {left} left"] = Row(reference, own={"forced_eos_ids": tuple(ends)}, room=6 + left)
    for n in (3, 4):
        reference = hf.SuppressTokensAtBeginLogitsProcessor(t(4, 8), 3)
        own = {"begin_suppress_ids": tuple(t(4, 8))}
        rows[f"begin_suppress_ids, answer of {n - 3}"] = Row(reference, own=own, length=n)
    # Where these are off, transformers has no such step at all.
    for k in (0, 1, 2, 40, VOCAB - 1, VOCAB, VOCAB + 1, 10**9):
        rows[f"top_k={k}"] = Row(hf.TopKLogitsWarper(k) if k else untouched, {"top_k": k})
    for p in (0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0):
        rows[f"top_p={p}"] = Row(hf.TopPLogitsWarper(p) if p < 1 else untouched, {"top_p": p}, any_of_equals=True)
    for p in (0.0, 1e-9, 0.05, 0.9, 1.0):
        rows[f"min_p={p}"] = Row(hf.MinPLogitsWarper(p), {"min_p": p})
    return rows


TEMPERATURES = (1e-45, 1e-30, 1e-8, 0.1, 1.0, 1.7, 1e8, 1e30, 1e308)


def ids_of(vocab: int, length: int) -> Tensor:
    """Texts of few tokens, so that they repeat themselves. [rows, length]"""
    few = torch.randint(3, 6, (ROWS, length), generator=torch.Generator().manual_seed(5))
    return few % vocab


def hopeless(x: Tensor) -> bool:
    """Whether a row has NaN, +inf, or nothing but −inf."""
    return not bool(x.amax(-1).isfinite().all())


def moved(x: Tensor) -> Tensor:
    """The best at 0, as a temperature of 1 leaves it."""
    return x - x.amax(-1, keepdim=True)


def sampling_of(x: Tensor, row: Row, **call: Any) -> Sampling:
    settings = GenerationSettings(eos_ids=tuple(token % x.shape[1] for token in ENDS), **row.own)
    return resolve(settings, x.shape[1], **{"temperature": 1.0, "seed": SEED, **row.call, **call})


def text_of(x: Tensor, row: Row) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what was produced."""
    ids = ids_of(x.shape[1], row.length).tolist()
    return [one[: row.start] for one in ids], [one[row.start :] for one in ids]


def processed(x: Tensor, row: Row = PLAIN, mask: Any = None, **call: Any) -> Tensor:
    """Ours: what the arguments of a call make of logits."""
    return sampling_of(x, row, **call).processed(x, *text_of(x, row), [row.room] * ROWS, mask)


def chosen(x: Tensor, **call: Any) -> list[int]:
    """And the tokens."""
    return sampling_of(x, PLAIN, **call).choose(x, *text_of(x, PLAIN), [0] * ROWS, [PLAIN.room] * ROWS)


def sorts(x: Tensor) -> Tensor:
    return x.sort(-1).values


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", table(VOCAB))
def test_cell(name: str, column: str) -> None:
    x = COLUMNS[column](VOCAB)
    row = table(x.shape[1])[name]
    before = x.clone()
    wanted = row.theirs(ids_of(x.shape[1], row.length), x.float().clone())
    if hopeless(x.float()) or hopeless(wanted):
        with pytest.raises(RequestError):
            processed(x, row)
    else:
        ours, wanted = processed(x, row), moved(wanted)
        if row.any_of_equals:
            assert torch.equal(sorts(ours), sorts(wanted))
        else:
            assert torch.equal(ours, wanted)
        assert bool((ours.amax(-1) == 0).all())
    assert torch.equal(x.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))  # nobody's logits are written to


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("value", TEMPERATURES)
def test_temperature(value: float, column: str) -> None:
    """In fp64 transformers' division does not overflow."""
    x = COLUMNS[column](VOCAB)
    if hopeless(x.float()):
        with pytest.raises(RequestError):
            processed(x, temperature=value)
        return
    ours = processed(x, temperature=value)
    wide = x.double() - x.double().amax(-1, keepdim=True)
    wanted = hf.TemperatureLogitsWarper(value)(torch.zeros(ROWS, 1), wide).softmax(-1)
    assert torch.allclose(ours.double().softmax(-1), wanted, atol=1e-6, rtol=0)
    assert bool((ours.amax(-1) == 0).all())


@pytest.mark.parametrize("column", COLUMNS)
def test_greedy(column: str) -> None:
    """Of equals the first, as numpy's argmax has it."""
    x = COLUMNS[column](VOCAB)
    if hopeless(x.float()):
        with pytest.raises(RequestError):
            chosen(x, temperature=0)
    else:
        assert chosen(x, temperature=0) == x.double().numpy().argmax(-1).tolist()


@pytest.mark.parametrize("column", COLUMNS)
def test_the_draw(column: str) -> None:
    """The running sum in numpy's longest float; the number that is looked up in it is pinned in test_logits.py."""
    x = COLUMNS[column](VOCAB)
    if hopeless(x.float()):
        with pytest.raises(RequestError):
            chosen(x)
        return
    exact = np.exp((x.double() - x.double().amax(-1, keepdim=True)).numpy().astype(np.longdouble))
    sums = exact.cumsum(-1) / exact.sum(-1, keepdims=True)
    wanted = [int((row <= steps.uniform(SEED, 0, 9)).sum()) for row in sums]
    assert chosen(x) == wanted
    assert all(exact[row, token] > 0 for row, token in enumerate(wanted))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Guides, Any]]:
    """Forms as ours, and as llguidance's own reading of the same vocabulary."""
    tokenizer = byte_level(tmp_path_factory.mktemp("bytes"))
    size = tokenizer.vocab_size
    theirs = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=list(tokenizer.eos_ids))
    ends = frozenset(tokenizer.eos_ids)
    schema = json.dumps({"enum": [1, "two", None], "x-guidance": {"whitespace_flexible": False}})
    make = llguidance.LLMatcher
    return [
        (Guides(Constraint(kind, text), tokenizer, size, ends), (theirs, form))
        for kind, text, form in (
            ("regex", "[a-m]{1,3}", make.grammar_from_regex("[a-m]{1,3}")),
            ("grammar", 'start: "x" | "yes" "z"?', make.grammar_from_lark('start: "x" | "yes" "z"?')),
            ("schema", schema, make.grammar_from_json_schema(schema)),
        )
    ]


@pytest.mark.parametrize("column", COLUMNS)
def test_form(column: str, forms: list[tuple[Guides, Any]]) -> None:
    """The mask of each form, at its beginning: llguidance's own code sets the forbidden to −inf.

    A vocabulary is the tokenizer's, so columns of one and two tokens are the first of all here.
    """
    for guides, (tokenizer, form) in forms:
        size = tokenizer.vocab_size
        x = COLUMNS[column](size)
        x = torch.nn.functional.pad(x, (0, size - x.shape[1]), value=NEVER)
        guide, matcher = guides.new(), llguidance.LLMatcher(tokenizer, form)
        bits = llguidance.numpy.allocate_token_bitmask(1, size)
        llguidance.numpy.fill_next_token_bitmask(matcher, bits)
        wanted = x.float().numpy().copy()
        llguidance.numpy.apply_token_bitmask_inplace(wanted, bits.repeat(ROWS, 0))
        masked = partial(mask, guides=[guide] * ROWS)
        if hopeless(x.float()) or hopeless(torch.from_numpy(wanted)):
            with pytest.raises(RequestError):
                processed(x, mask=masked)
        else:
            assert torch.equal(processed(x, mask=masked), moved(torch.from_numpy(wanted)))
