"""Reading ahead: the same bytes as reading one after another, and the same errors."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from cutaway.errors import TruncatedError
from cutaway.formats import ahead
from cutaway.formats.ahead import Ahead, calls
from cutaway.formats.gguf import GgufFile

from .gguf_bytes import gguf, tensor

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="preadv is asked for on Linux alone")


def written(path: Path, sizes: list[int]) -> Path:
    """A GGUF of F32 vectors of these lengths, of random bytes."""
    table, data = [], b""
    for i, size in enumerate(sizes):
        table.append(tensor(f"t{i}", [size], 0, len(data)))
        data += random.Random(i).randbytes(4 * size) + bytes(-4 * size % 32)
    path.write_bytes(gguf([], table, data))
    return path


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of tensors that came ahead."""
    came: list[str] = []
    take = Ahead.take

    def watched(self: Ahead, name: str) -> Any:
        found = take(self, name)
        came.extend([name] if found is not None else [])
        return found

    monkeypatch.setattr(Ahead, "take", watched)
    return came


@only_linux
@pytest.mark.parametrize("most_bytes", [64, 1000, 1 << 28])
@pytest.mark.parametrize("most_buffers", [2, 3, 512])
@pytest.mark.parametrize("gap", [0, 40, 1 << 20])
def test_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[str], most_bytes: int, most_buffers: int, gap: int
) -> None:
    """Whatever goes into one call, and whichever tensors are asked for."""
    monkeypatch.setattr(ahead, "_MOST_BYTES", most_bytes)
    monkeypatch.setattr(ahead, "_MOST_BUFFERS", most_buffers)
    monkeypatch.setattr(ahead, "_LARGEST_GAP", gap)
    path = written(tmp_path / "m.gguf", [8, 3, 500, 1, 17, 64])
    with GgufFile(path) as plain, GgufFile(path) as file:
        names = [name for name in plain.names() if name != "t3"]
        file.read_ahead(reversed(names))
        for name in plain.names():
            assert torch.equal(file.read(name).view(torch.uint8), plain.read(name).view(torch.uint8))
        assert counted == names
        told: list[int] = []
        assert (file.raw("t2", progress=told.append) == plain.raw("t2")).all()  # a second time, as ever
        assert sum(told) == 2000


def test_calls_go_no_further_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MOST_BYTES", 100)
    monkeypatch.setattr(ahead, "_MOST_BUFFERS", 4)
    monkeypatch.setattr(ahead, "_LARGEST_GAP", 10)
    memory = [memoryview(bytearray(size)) for size in (30, 30, 250, 5, 5)]
    found = list(calls(zip([0, 32, 62, 330, 341], memory, strict=True)))
    for _, buffers in found:
        assert len(buffers) <= 4
        assert sum(map(len, buffers)) <= 100 + 10
    assert [(at, at + sum(map(len, buffers))) for at, buffers in found] == [
        (0, 62),
        (62, 162),
        (162, 262),
        (262, 312),
        (330, 335 + 6 + 5),
    ]


@pytest.mark.parametrize("progress", [None, lambda n: None])
def test_a_file_cut_short_under_us(tmp_path: Path, progress: Callable[[int], None] | None) -> None:
    """What did not come is read as ever, and that names it."""
    path = written(tmp_path / "m.gguf", [8, 500, 8])
    with GgufFile(path) as file:
        os.truncate(path, path.stat().st_size - 48)
        file.read_ahead(file.names())
        assert file.read("t0", progress=progress).numel() == 8
        assert file.read("t1", progress=progress).numel() == 500
        with pytest.raises(TruncatedError) as caught:
            file.read("t2", progress=progress)
        assert caught.value.field == "t2"


@only_linux
@pytest.mark.parametrize(
    ("where", "what", "error"),
    [
        (os, "preadv", OSError(5, "Input/output error")),
        (Thread, "start", RuntimeError("can't start new thread")),
    ],
    ids=["reading", "threads"],
)
def test_a_system_that_refuses(
    where: Any, what: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    """It is only a faster way: without it the file is read as ever."""

    def refuse(*_: object) -> None:
        raise error

    path = written(tmp_path / "m.gguf", [8, 3])
    monkeypatch.setattr(where, what, refuse)
    with GgufFile(path) as plain, GgufFile(path) as file:
        file.read_ahead(file.names())
        assert torch.equal(file.read("t0").view(torch.uint8), plain.read("t0").view(torch.uint8))
    assert counted == []


@only_linux
def test_closing_waits_for_the_call_and_begins_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed under a call may be another file's by then."""
    monkeypatch.setattr(ahead, "_MOST_BYTES", 64)
    path = written(tmp_path / "m.gguf", [16] * 100)
    file = GgufFile(path)
    read, closed, after = os.preadv, False, []

    def watched(*arguments: Any) -> int:
        after.append(closed)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", watched)
    file.read_ahead(file.names())
    file.close()
    closed = True
    assert not any(after)
