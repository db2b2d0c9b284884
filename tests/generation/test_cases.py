"""The cases of bug reports that are about sampling, caches and streams: each has its test, and these are the last ones.

S01 S02 S05 S06 S07   test_logits.py        K01 K03 K09   tests/reference/test_cache_splits.py
S07 S12 V04 V05 V06   test_reports.py       K06           test_families.py
S11                   test_generate.py, tests/test_model.py
T01                   test_generate.py, test_streaming.py, tests/tokenizers/test_stream.py
K08                   tests/cache/test_caches.py
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cutaway.errors import RequestError
from cutaway.generation.params import Sampling, resolve
from cutaway.generation.reading import read_sources
from cutaway.generation.session import Session
from cutaway.model import Model
from cutaway.spec import GenerationSettings
from tests.reference import tiny, tiny_seq2seq

TESTS = Path(__file__).parents[1]
CASES = "S01 S02 S05 S06 S07 S11 S12 K01 K03 K06 K08 K09 T01 V04 V05 V06"


@pytest.mark.parametrize("case", CASES.split())
def test_every_case_has_a_test(case: str) -> None:
    """By name, in the docstring of a test, or in the test's own name."""
    said = re.compile(rf'"""Cases? [^"]*\b{case}\b|def test_{case.lower()}_')
    files = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    assert any(said.search(path.read_text()) for path in files)


def test_s02_top_p_of_nothing_and_of_nonsense() -> None:
    """Case S02, whole: token 1 whatever is drawn; what is no share of anything is refused."""
    logits = torch.tensor([[0.1, 0.6, 0.3]]).log()
    for seed in range(64):
        assert Sampling(temperature=1.0, top_p=0.0, seed=seed).choose(logits, [[0]], [[]], [0]) == [1]
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(RequestError) as caught:
            resolve(GenerationSettings(), 3, top_p=p)
        assert caught.value.field == "top_p"


def test_s05_pads_never_count() -> None:
    """Case S05, in a batch: token 0, which stands at pads, is as likely beside a longer prompt as alone."""
    model = Model(tiny.transformer("llama"))
    prompts = [[7, 8], [9, 5, 11, 6, 23, 4, 40, 12]]
    how: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "seed": 1, "repetition_penalty": 50.0}
    (alone,) = model.generate(prompts[:1], processed_logprobs=64, **how)
    beside = model.generate(prompts, processed_logprobs=64, **how)[0]
    ((one,), (other,)) = alone.processed_logprobs, beside.processed_logprobs
    assert dict(other.top)[0] == pytest.approx(dict(one.top)[0], abs=1e-4)
    # The prompt's own tokens do count.
    plain = model.logits(prompts[0])[0, -1].log_softmax(-1)
    for token in prompts[0]:
        assert dict(one.top)[token] < float(plain[token]) - 1


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
@torch.no_grad()
def test_k03_in_pieces_beside_a_source(name: str) -> None:
    """Case K03, of cross attention: a target of forty tokens in several pieces is one pass over it."""
    model = Model(tiny_seq2seq.transformer(name)).transformer
    text, target = tiny.ids(23, seed=2).tolist(), tiny.ids(40, seed=3).tolist()
    source = read_sources(model, [text])
    whole = model(torch.tensor([target]), source=source)[0]
    for sizes in ([12, 18, 10], [1, 39], [39, 1]):
        session, start = Session(model, capacity=8, source=source), 0
        for size in sizes:
            logits = session.feed([target[start : start + size]])
            start += size
            assert float((logits[0] - whole[start - 1]).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
@torch.no_grad()
def test_k08_a_text_with_a_gap(name: str) -> None:
    """Case K08, of a session: of ``a b c d e f g h j``, ``a b e f h j`` keeps ``a b``, and is as if read anew."""
    model = tiny.transformer(name)
    a, b, c, d, e, f, g, h, j = range(10, 19)
    session = Session(model)
    session.feed([[a, b, c, d, e, f, g, h, j]])
    new = [a, b, e, f, h, j]
    assert session.reuse([new]) == [2]
    reused = session.feed([new[2:]])
    assert float((reused[0] - model(torch.tensor([new]))[0, -1]).abs().max()) <= 1e-4
