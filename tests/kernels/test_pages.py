"""Weights move into large pages, and nothing else about them changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cutaway.kernels.pages import in_large_pages, runs_of


def test_runs_are_pages_that_are_mostly_used() -> None:
    page = 1000
    assert runs_of([], page) == []
    assert runs_of([(3000, 1000), (4000, 500), (4500, 250), (7100, 800)], page) == [(3000, 2000), (7000, 1000)]
    assert runs_of([(3000, 700)], page) == []  # less than three quarters
    assert runs_of([(2500, 2000)], page) == [(3000, 1000)]  # the halves at both ends are left


def _large(address: int, n_bytes: int) -> int:
    """Bytes of large pages in the mappings that hold these addresses."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            start, stop = (int(part, 16) for part in word.split("-"))
            inside = start < address + n_bytes and address < stop
        elif inside and word == "AnonHugePages:":
            found += 1024 * int(line.split()[1])
    return found


def test_weights_move() -> None:
    weight = torch.arange(8 << 20, dtype=torch.float32)  # 32 MiB
    address = weight.data_ptr()
    if (thread := in_large_pages([weight], after=0)) is None:
        pytest.skip("this system has no large pages to ask for")
    thread.join()
    assert weight.data_ptr() == address
    assert torch.equal(weight, torch.arange(8 << 20, dtype=torch.float32))
    if (large := _large(address, weight.nbytes)) == 0:
        pytest.skip("this system refuses (Linux before 6.1, or no memory in one piece)")
    assert large >= 16 << 20


def test_small_weights_are_left() -> None:
    assert in_large_pages([torch.zeros(1000), torch.zeros(0)]) is None
