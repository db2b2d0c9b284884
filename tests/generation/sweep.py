"""Which families a test takes: a few by default, all of them in the slow sweep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reference import tiny

# A window in every layer; windows, caps and norms of queries and keys; learned positions.
FEW = ("mistral-window", "gemma3-caps", "gpt2")


def families(*few: str) -> list[Any]:
    """Every family, those not among ``few`` marked slow."""
    unknown = set(few) - set(tiny.FAMILIES)
    assert not unknown, unknown
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in tiny.FAMILIES]
