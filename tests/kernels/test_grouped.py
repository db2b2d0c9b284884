"""Rows in groups, each by a matrix of its own: the native products beside their definition, and bit by bit beside
those of one matrix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cutaway.kernels import Stored, grouped, grouped_natively, library, missing, multiply, stored_matrix, together
from cutaway.kernels.stored import FORMATS, TOGETHER
from tests.kernels.test_products import KINDS, PLAIN, random_bytes

if missing():
    pytest.skip("there is no native library here", allow_module_level=True)

# None, one, few, and enough for a product to themselves.
COUNTS = {
    "decode": [1, 0, 0, 1, 0, 1],
    "one token": [0, 0, 1, 0, 0, 0],
    "a prompt": [7, 0, 33, 1, 12, 2],
    "a long prompt": [5, 1700, 0, 1, 1650, 3],
    "none": [0, 0, 0, 0, 0, 0],
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def matrices(number: int, rows: int, cols: int) -> Tensor:
    """Six of one format; of format 0 plain floats."""
    if number == TOGETHER:
        return together(stored_matrix(random_bytes(8, 6 * rows, cols).view(6, rows, -1), 8, cols))
    raw = random_bytes(number, 6 * rows, cols).view(6, rows, -1)
    return raw.view(torch.float32) if number == 0 else stored_matrix(raw, number, cols)


def rows_of_x(counts: list[int], cols: int) -> Tensor:
    return torch.randn(sum(counts), cols, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", COUNTS)
@pytest.mark.parametrize("number", [*FORMATS, TOGETHER], ids=lambda n: KINDS[n].name if n in KINDS else "int8")
@torch.no_grad()
def test_bits_of_one_matrix(number: int, case: str, threads: int) -> None:
    """Whatever else is asked for beside it; and the definition, by the numbers."""
    torch.set_num_threads(threads)
    counts, rows = COUNTS[case], 48 if number == TOGETHER else 45
    for cols in (256,) if number not in PLAIN else (256, 57):
        x, several = rows_of_x(counts, cols), matrices(number, rows, cols)
        found = grouped_natively(x, several, counts)
        assert found.shape == (len(x), rows)
        for mine, part, one in zip(found.split(counts), x.split(counts), several.unbind(), strict=True):
            assert torch.equal(mine, multiply(part, one))
            assert isinstance(one, Stored) == (number != 0)
        if number != TOGETHER:  # which rounds x
            dense = several.dense() if isinstance(several, Stored) else several
            torch.testing.assert_close(found, grouped(x, dense, counts), rtol=1e-4, atol=1e-3)
        if number != 0:  # which the definition leaves to PyTorch
            assert torch.equal(grouped(x, several, counts), found)


@torch.no_grad()
def test_rounded_rows_in_groups() -> None:
    """Of whole numbers: a few groups and large ones in the same call, where x is rounded twice."""
    counts = [3, 1700, 0, 1, 1650, 9]
    x, several = rows_of_x(counts, 128), matrices(TOGETHER, 32, 128)
    assert isinstance(several, Stored)
    assert several.rounds
    exact = grouped(x, several.dense(), counts)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        apart = grouped_natively(x, several, counts) - exact
        assert float(apart.norm() / exact.norm()) < 0.01


def test_gradients_and_other_numbers_take_the_definition() -> None:
    counts = COUNTS["a prompt"]
    x, several = rows_of_x(counts, 64), matrices(8, 32, 64)
    weigh = torch.randn(len(x), 32, generator=torch.Generator().manual_seed(4))
    dense = several.dense().requires_grad_()  # type: ignore[operator]
    grads = []
    for weights in (several, dense):
        read = x.clone().requires_grad_()
        (grouped_natively(read, weights, counts) * weigh).sum().backward()
        grads.append(read.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
    assert dense.grad is not None
    half = dense.detach().bfloat16()
    assert torch.equal(grouped_natively(x.bfloat16(), half, counts), grouped(x.bfloat16(), half, counts))
    turned = dense.detach().transpose(1, 2).contiguous().transpose(1, 2)  # not one after another
    assert torch.equal(grouped_natively(x, turned, counts), grouped(x, turned, counts))


@torch.no_grad()
def test_what_does_not_fit() -> None:
    several = matrices(8, 32, 64)
    for x, counts in ((torch.ones(3, 32), [3, 0, 0, 0, 0, 0]), (torch.ones(3, 64), [1, 1, 0, 0, 0, 0])):
        with pytest.raises(RuntimeError):
            grouped_natively(x, several, counts)
        with pytest.raises(RuntimeError):
            grouped(x, several, counts)
    native = library()
    assert native is not None
    with pytest.raises(RuntimeError, match="groups and their matrices"):
        native.grouped(torch.ones(1, 64), several.matrix, 0, [2, -1])  # type: ignore[attr-defined]
