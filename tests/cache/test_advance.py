"""A pass of one token in each row, planned by ``advance``, is the one that ``begin`` plans."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tests.reference import tiny

from cutaway.cache import StoredCache, build, new_cache
from cutaway.cache.mask import MaskKind
from cutaway.cache.slots import SlotView


def seen(cache: StoredCache, layer: int) -> tuple[list[object], torch.Tensor]:
    """Which slot takes each row's token, which keys are read where, and who may read whom."""
    view = cache.layer(layer)
    assert isinstance(view, SlotView)
    plan, rows = view.plan, len(cache.lengths)
    slots = view.places.slots  # type: ignore[attr-defined]
    mask = torch.ones(rows, 1, 1, plan.keys.shape[1], dtype=torch.bool)
    if plan.kind is not MaskKind.FULL:
        mask = plan.piece(0, 1)
    return [slots.expand(rows, 1).tolist(), plan.queries.tolist(), plan.keys.tolist(), cache.lengths], mask


def same(cache: StoredCache) -> None:
    """Plan the next token both ways, twice."""
    for _ in range(2):
        rows = [*range(len(cache.lengths))]
        other = cache.fork(rows)
        positions = cache.advance()
        assert positions is not None
        other.begin(torch.tensor(other.lengths)[:, None])
        for layer in range(len(cache._places)):
            (found, may), (wanted, should) = seen(cache, layer), seen(other, layer)
            assert found == wanted
            assert torch.equal(may, should)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
@pytest.mark.parametrize("lengths", [[0], [3], [5, 5], [0, 4, 9]])
def test_the_same_plan(name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after buffers grow and rings go round, after rows are chosen and texts go back."""
    monkeypatch.setattr(build, "SLACK", 5)
    stack, chance = tiny.transformer(name).spec.decoder, random.Random(0)
    cache = new_cache(stack, batch=len(lengths), capacity=8)
    steps = torch.arange(max(lengths))
    if max(lengths):
        cache.begin(torch.where(steps < torch.tensor(lengths)[:, None], steps, -1))
    for _ in range(40):
        same(cache)
        if chance.random() < 0.2:
            cache.select([chance.randrange(len(lengths)) for _ in lengths])
        if chance.random() < 0.3:
            cache.rewind([max(0, n - chance.randrange(3)) for n in cache.lengths])
    twin = new_cache(stack, batch=len(lengths))
    twin.restore(cache.state())
    same(twin)


def elsewhere(cache: StoredCache) -> None:
    cache.begin(torch.tensor([[3, 4, 5]]))


def documents(cache: StoredCache) -> None:
    cache.begin(torch.tensor([[0, 1, 0]]), torch.tensor([[0, 0, 1]]))


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("begun", [elsewhere, documents])
def test_only_texts_go_on(name: str, begun: Callable[[StoredCache], None]) -> None:
    """Where a row does not count from 0, or holds several texts, nothing is done; also after it was saved."""
    stack = tiny.transformer(name).spec.decoder
    cache, twin = new_cache(stack), new_cache(stack)
    begun(cache)
    assert cache.advance() is None
    assert cache.lengths == [3]
    twin.restore(cache.state())
    assert twin.advance() is None
