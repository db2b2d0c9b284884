"""Under somebody's autocast, answers and what is seen of them are in the model's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cutaway.generation.reading import read_sources
from cutaway.generation.session import Session
from cutaway.inspection import trace
from cutaway.model import Model
from tests.reference import tiny, tiny_seq2seq

IDS = [[5, 9, 17, 7], [11, 12]]


def both(ask: Any) -> list[Any]:
    plain = ask()
    with torch.autocast("cpu", torch.bfloat16):
        return [plain, ask()]


@pytest.mark.parametrize("case", ["llama", "mixtral-window", "t5"])
@pytest.mark.parametrize("more", [0, 3])
def test_traces(case: str, more: int) -> None:
    model = tiny_seq2seq.transformer(case) if case == "t5" else tiny.transformer(case)
    sources = [[4, 5, 6], [7, 8]] if case == "t5" else None
    one, two = both(lambda: trace(model, IDS, ("*",), max_tokens=more, sources=sources))
    assert one.tokens == two.tokens
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"deterministic": True}, {"kv_dtype": "int8"}])
def test_answers(options: Any) -> None:
    model = Model(tiny.transformer("llama"))
    asked = {"max_tokens": 5, "temperature": 0, "logprobs": 2, **options}
    one, two = both(lambda: model.generate(IDS, **asked))
    assert [each.tokens for each in one] == [each.tokens for each in two]
    assert [each.logprobs for each in one] == [each.logprobs for each in two]
    one, two = both(lambda: model.score(IDS[0], **({} if "num_beams" in options else options)))
    assert one == two


def test_sessions_and_sources() -> None:
    model = tiny.transformer("llama")
    one, two = both(lambda: Session(model, 2, paged=True).feed(IDS))
    torch.testing.assert_close(two, one, rtol=0, atol=0)
    seq = tiny_seq2seq.transformer("t5")
    one, two = both(lambda: Session(seq, 1, source=read_sources(seq, [[4, 5, 6]])).feed(IDS[:1]))
    torch.testing.assert_close(two, one, rtol=0, atol=0)
