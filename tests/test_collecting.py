"""The collector rests, and works again as it did before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from cutaway.collecting import uncollected


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = gc.isenabled()
    yield
    (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_left_as_it_was(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() is on


def test_after_an_error_too() -> None:
    gc.enable()
    with pytest.raises(ValueError, match="no"), uncollected():
        raise ValueError("no")
    assert gc.isenabled()


def test_what_came_is_old() -> None:
    """What was put together is not looked through at the next hundred objects, but when everything is."""
    gc.enable()
    with uncollected():
        made: list[list[int]] = [[] for _ in range(10_000)]
    young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
    assert young.isdisjoint(map(id, made))


class Kept:
    """Something in a circle of its own, which only the collector finds."""

    def __init__(self, inside: list[object]) -> None:
        inside.append(self)
        self.inside = inside


def test_garbage_that_came_is_found_later() -> None:
    gc.enable()
    with uncollected():
        gone = weakref.ref(Kept([]))
    gc.collect()
    assert gone() is None


def test_what_somebody_has_frozen_stays_so() -> None:
    gc.enable()
    gc.freeze()
    try:
        with uncollected():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
