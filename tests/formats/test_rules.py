"""Rules that take tensors apart and put them together: each the exact inverse of itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cutaway.formats.rules import Fuse, Stack

OURS = ("q", "k", "v")


def rows(*numbers: int) -> Tensor:
    """A matrix whose rows are told apart by their number."""
    return torch.tensor(numbers)[:, None] * torch.ones(1, 2)


def test_rows_in_groups() -> None:
    """Two heads of two channels: q·k·v of the first, then of the second."""
    rule = Fuse(OURS, ("qkv",), (4, 4, 4), groups=2)
    q, k, v = rule.load((rows(0, 1, 20, 21, 40, 41, 2, 3, 22, 23, 42, 43),))
    assert torch.equal(q, rows(0, 1, 2, 3))
    assert torch.equal(k, rows(20, 21, 22, 23))
    assert torch.equal(v, rows(40, 41, 42, 43))


def test_groups_of_several_queries() -> None:
    """Two heads of queries for each of keys and values."""
    rule = Fuse(OURS, ("qkv",), (4, 2, 2), groups=2)
    q, k, v = rule.load((rows(0, 1, 20, 40, 2, 3, 21, 41),))
    assert torch.equal(q, rows(0, 1, 2, 3))
    assert torch.equal(k, rows(20, 21))
    assert torch.equal(v, rows(40, 41))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(), (5,)])
def test_there_and_back(groups: int, transposed: bool, shape: tuple[int, ...]) -> None:
    sizes = (16, 8, 4)
    rule = Fuse(OURS, ("qkv",), sizes, transposed=transposed, groups=groups)
    own = tuple(torch.randn(size, *shape) for size in sizes)
    (stored,) = rule.save(own)
    assert stored.is_contiguous()
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(rule.load((stored,)), own, strict=True))
    assert torch.equal(rule.save(rule.load((stored,)))[0], stored)


@pytest.mark.parametrize("shape", [(3,), (3, 5)])
@pytest.mark.parametrize("n", [1, 4])
def test_tensors_on_one_another(n: int, shape: tuple[int, ...]) -> None:
    """A layer's experts: a file has each, the model has all as one."""
    rule = Stack(("all",), tuple(f"experts.{e}" for e in range(n)))
    stored = tuple(torch.randn(shape) for _ in range(n))
    (whole,) = rule.load(stored)
    assert whole.shape == (n, *shape)
    assert all(torch.equal(whole[e], one) for e, one in enumerate(stored))
    again = rule.save((whole,))
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(again, stored, strict=True))
