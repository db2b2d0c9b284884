"""A session's rows: any way of feeding, going back, breaking off and picking out equals one plain pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.cache import build, pages
from cutaway.errors import ContextExceeded, RequestError
from cutaway.generation import passes as module
from cutaway.generation.session import Session
from cutaway.inspection import Recorder
from cutaway.models import Transformer
from tests.generation.sweep import FEW, families
from tests.reference import tiny

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def small_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SLACK", 4)
    monkeypatch.setattr(build, "PAGE", 4)
    monkeypatch.setattr(pages, "POISON", True)


@pytest.fixture(scope="module", params=families(*FEW))
def model(request: pytest.FixtureRequest) -> Transformer:
    return tiny.transformer(request.param)


@pytest.fixture(params=[False, True], ids=["plain", "paged"])
def paged(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@torch.no_grad()
def after(model: Transformer, rows: list[list[int]]) -> Tensor:
    """What follows each row, by an uncached pass of its own. [batch, vocab]"""
    return torch.stack([model(torch.tensor([row]))[0, -1] for row in rows])


def close(model: Transformer, session: Session, logits: Tensor) -> None:
    assert float((logits - after(model, session.tokens)).abs().max()) <= TOLERANCE


def text(n: int, seed: int = 1) -> list[int]:
    return tiny.ids(n, seed=seed).tolist()


def test_any_split(model: Transformer, paged: bool) -> None:
    chance = random.Random(0)
    whole = [text(40, 1), text(29, 2), text(35, 3)]
    session = Session(model, 3, capacity=4, paged=paged)
    while any(len(held) < len(row) for held, row in zip(session.tokens, whole, strict=True)):
        sizes = [chance.choice([0, 0, 1, 2, 5, 11]) for _ in whole]
        news = [row[len(held) :][:n] for held, row, n in zip(session.tokens, whole, sizes, strict=True)]
        logits = session.feed(news)
        fed = [row for row, new in enumerate(news) if new]
        if fed:
            wanted = after(model, [session.tokens[row] for row in fed])
            assert float((logits[fed] - wanted).abs().max()) <= TOLERANCE
    assert session.tokens == whole


def test_going_back(model: Transformer, paged: bool) -> None:
    """A little, a lot, past what a ring holds, to nothing, and on with something else."""
    session = Session(model, 2, paged=paged)
    session.feed([text(38, 1), text(30, 2)])
    for lengths in ((37, 30), (36, 28), (30, 9), (5, 9), (0, 1), (0, 0)):
        session.rewind(lengths)
        assert [len(held) for held in session.tokens] == list(lengths)
        logits = session.feed([text(3, 7), text(1, 8)])
        close(model, session, logits)
    logits = session.feed([text(20, 4), text(33, 5)])
    close(model, session, logits)
    session.rewind([10, 20])
    session.rewind([9, 3])
    close(model, session, session.feed([text(1, 4), text(2, 4)]))


def test_rows_picked_out(model: Transformer, paged: bool) -> None:
    session = Session(model, 3, paged=paged)
    session.feed([text(20, 1), text(9, 2), text(31, 3)])
    session.select([2, 0, 2])
    close(model, session, session.feed([[5], [6], [7]]))
    session.rewind([5, 21, 32])  # a row has to be read again, the others not
    session.select([0, 2])
    close(model, session, session.feed([[8], [9]]))


def test_rows_that_come_and_go(model: Transformer, paged: bool) -> None:
    """Also the last one."""
    session = Session(model, 1, capacity=4, paged=paged)
    session.feed([text(17, 1)])
    session.join(2)
    close(model, session, session.feed([[5], text(9, 2), text(21, 3)]))
    session.select([2, 1])
    session.join()
    close(model, session, session.feed([text(3, 4), [6], text(2, 5)]))
    other = session.fork([])
    for empty in (other, session):
        empty.select([])
        assert empty.tokens == []
        empty.join()
        close(model, empty, empty.feed([text(12, 6)]))


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (RuntimeError, "decoder.layers.0.attn.k"),
        (KeyboardInterrupt, "decoder.layers.1.mlp.act"),
        (KeyboardInterrupt, "logits"),
    ],
)
def test_a_pass_that_breaks_off(model: Transformer, paged: bool, kind: type[BaseException], where: str) -> None:
    """Short passes, and ones so long that a ring has lost what it held before."""

    def fail(value: Tensor) -> Tensor:
        raise kind("no")

    bomb = Recorder([], {tiny.here(model, where): [fail]})
    for start, new in ((20, 1), (20, 3), (10, 30), (0, 9)):
        session = Session(model, 2, capacity=16, paged=paged)
        if start:
            session.feed([text(start, 1), text(start - 4, 2)])
        before = [list(row) for row in session.tokens]
        with pytest.raises(kind):
            session.feed([text(new, 5), text(max(new - 2, 1), 6)], bomb)
        assert session.tokens == before
        close(model, session, session.feed([text(1, 3), text(4, 4)]))
        close(model, session, session.feed([text(6, 5), text(1, 6)]))


@pytest.mark.parametrize("words", [{}, {"paged": True}, {"steady": True}, {"kv_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_is_no_number_goes_with_the_pass(name: str, words: dict[str, Any]) -> None:
    """Of a pass that broke off, or was taken back: a key that nobody may read would still be NaN times nothing."""

    def fail(value: Tensor) -> Tensor:
        raise KeyboardInterrupt

    spoil = {"decoder.layers.0.attn.v": [lambda x: x * float("nan")]}
    session = Session(tiny.transformer(name), 2, **words)
    session.feed([text(5, 1), text(14, 2)])
    with pytest.raises(KeyboardInterrupt):
        session.feed([text(3, 3), text(3, 4)], Recorder([], {**spoil, "decoder.layers.1.attn.q": [fail]}))
    session.feed([text(3, 3), text(1, 4)], Recorder([], spoil))
    session.rewind([5, 14])
    assert session.fork([1, 0]).feed([[1], [2, 3, 4]]).isfinite().all()
    logits = session.feed([[1], [2]])
    if "kv_dtype" not in words:
        close(session.model, session, logits)
    assert logits.isfinite().all()


def test_a_long_pass_that_breaks_off_late(model: Transformer, paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third piece fails: the first two, already read, go too."""
    monkeypatch.setattr(module, "CHUNK", 7)
    count = 0

    def third(value: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return value

    session = Session(model, paged=paged)
    session.feed([text(9, 1)])
    with pytest.raises(KeyboardInterrupt):
        session.feed([text(25, 2)], Recorder([], {"decoder.layers.2.attn.v": [third]}))
    assert session.tokens == [text(9, 1)]
    close(model, session, session.feed([text(3, 3)]))


def test_ctrl_c_after_the_pass() -> None:
    """It may come between two lines: here, when one row's tokens are noted and the other's are not."""

    class Late(list[int]):
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

    model = tiny.transformer("mistral-window")
    session = Session(model, 2)
    session.feed([text(9, 1), text(5, 2)])
    with pytest.raises(KeyboardInterrupt):
        session.feed([text(2, 3), Late(text(2, 4))])
    assert session.tokens == [text(9, 1), text(5, 2)]
    close(model, session, session.feed([text(2, 5), text(3, 6)]))


def test_what_is_read_again_is_not_tapped() -> None:
    model = tiny.transformer("mistral-window")
    session = Session(model)
    session.feed([text(40)])
    session.rewind([10])
    recorder = Recorder(["decoder.layers.0.attn.q"])
    session.feed([text(2, 5)], recorder)
    assert [q.shape[1] for q in recorder.kept["decoder.layers.0.attn.q"]] == [2]


def test_rows_that_are_not_there() -> None:
    session = Session(tiny.transformer("gpt2"), 2)
    session.feed([text(5), text(3)])
    for lengths in ([6, 3], [-1, 3]):
        with pytest.raises(RequestError) as caught:
            session.rewind(lengths)
        assert caught.value.field == "lengths"
    with pytest.raises(ContextExceeded):
        session.feed([text(1), text(62)])
    close(session.model, session, session.feed([text(59, 2), text(61, 2)]))
