"""What somebody careless gives a session or a call: a typed error that names it, and everything as it was before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cutaway
from cutaway.cache import new_cache
from cutaway.errors import DatasetError, RequestError, ResourceError, StorageError
from cutaway.generation.session import Session
from cutaway.model import Model
from tests.reference import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return cutaway.load(tiny.write(tiny.config("llama"), tmp_path_factory.mktemp("model")))


CALLS: dict[str, tuple[Callable[[Session], Any], str]] = {
    "too few rows": (lambda s: s.feed([[1]]), "rows"),
    "too many rows": (lambda s: s.feed_each([[1], [2], [3]]), "rows"),
    "no rows": (lambda s: s.feed(None), "rows"),  # type: ignore[arg-type]
    "texts": (lambda s: s.feed(["ab", [1]]), "rows"),  # type: ignore[list-item]
    "an id below": (lambda s: s.feed([[1], [-1]]), "rows/1/0"),
    "an id past the vocabulary": (lambda s: s.feed([[1, 64], [1]]), "rows/0/1"),
    "half an id": (lambda s: s.feed([[1.5], [1]]), "rows/0/0"),  # type: ignore[list-item]  # was read as 1
    "lengths of one row": (lambda s: s.rewind([1]), "lengths"),
    "half a length": (lambda s: s.rewind([1.0, 0]), "lengths"),  # type: ignore[list-item]
    "yes for a length": (lambda s: s.rewind([True, 0]), "lengths"),
    "no lengths": (lambda s: s.rewind(None), "lengths"),  # type: ignore[arg-type]
    "a row that is not there": (lambda s: s.select([0, 2]), "rows"),
    "one from the end": (lambda s: s.select([-1]), "rows"),
    "half a row": (lambda s: s.fork([0.0]), "rows"),  # type: ignore[list-item]
    "a row's name": (lambda s: s.fork(["a"]), "rows"),  # type: ignore[list-item]
    "fewer than no rows": (lambda s: s.join(-1), "rows"),
    "half a row more": (lambda s: s.join(1.5), "rows"),  # type: ignore[arg-type]
    "salt that is text": (lambda s: s.join(1, "x"), "salt"),  # type: ignore[arg-type]
    "nothing to reuse": (lambda s: s.reuse(None), "rows"),  # type: ignore[arg-type]
    "no path to save to": (lambda s: s.save(None), "path"),  # type: ignore[arg-type]
    "bytes for a path": (lambda s: s.save(b"x"), "path"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_session_is_as_it_was(model: Model, name: str, paged: bool) -> None:
    session = Session(model.transformer, 2, paged=paged)
    session.feed([[3, 4, 5], [6]])
    call, field = CALLS[name]
    with pytest.raises(RequestError) as caught:
        call(session)
    assert caught.value.field == field
    assert session.tokens == [[3, 4, 5], [6]]
    fresh = Session(model.transformer, 2, paged=paged)
    wanted = fresh.feed([[3, 4, 5, 7], [6, 8]])
    assert torch.allclose(session.feed([[7], [8]]), wanted, atol=1e-4)


def test_rows_may_be_tensors(model: Model) -> None:
    session, plain = Session(model.transformer, 2), Session(model.transformer, 2)
    rows = torch.tensor([[3, 4], [5, 6]])
    assert torch.equal(session.feed(rows), plain.feed(rows.tolist()))  # type: ignore[arg-type]
    session.rewind(np.array([1, 0]))  # type: ignore[arg-type]
    assert session.tokens == [[3], []]


@pytest.mark.parametrize("wrong", [{"batch": -1}, {"batch": 1.5}, {"capacity": -5}, {"paged": 1}, {"steady": None}])
def test_sessions_that_there_are_not(model: Model, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        Session(model.transformer, **wrong)
    assert caught.value.field in wrong


def test_other_sessions_that_there_are_not(model: Model, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="most_pages"):
        new_cache(model.spec.decoder, paged=True, most_pages=1.5)  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match="no memory"):
        Session(model.transformer, capacity=10**15)
    for make in (lambda: Session(model), lambda: Session.load(model, tmp_path / "x")):  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"model\.transformer"):
            make()


@pytest.mark.parametrize(
    ("path", "error"),
    [
        *((path, RequestError) for path in (None, 5, b"x", [], "")),
        *((path, StorageError) for path in ("a\0b", "\ud800")),
    ],
)
def test_paths_that_are_none(model: Model, tmp_path: Path, path: Any, error: type[Exception]) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": [3]}')
    session = Session(model.transformer)
    for call in (
        lambda: session.save(path),
        lambda: Session.load(model.transformer, path),
        lambda: cutaway.save(model, path, format="cutaway"),
        lambda: model.generate_file(path, tmp_path / "o.jsonl"),
        lambda: model.generate_file(tmp_path / "p.jsonl", path),
    ):
        with pytest.raises(error):
            call()
    assert [*tmp_path.iterdir()] == [tmp_path / "p.jsonl"]


@pytest.mark.parametrize("name", ["max_tokens", "early_stopping", "kv_dtype"])
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_an_array_where_a_word_may_stand(model: Model, name: str, make: Callable[[list[int]], Any]) -> None:
    """It was compared with the word, number by number."""
    with pytest.raises(RequestError) as caught:
        model.generate([3], **{name: make([1, 2])})
    assert caught.value.field == name


def test_a_token_with_5000_digits(model: Model, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": [3], "logit_bias": {{"{"9" * 5000}": 1}}}}')
    with pytest.raises(DatasetError, match=r"p\.jsonl:1: logit_bias"):
        model.generate_file(tmp_path / "p.jsonl", tmp_path / "o.jsonl")
