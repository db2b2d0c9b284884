"""The collector rests, and works again as it did before."""

from __future__ import annotations

import gc
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
