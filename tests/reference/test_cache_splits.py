"""Cached passes against transformers' full ones: any split, every kind of store."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from cutaway.cache import StoredCache, build, pages
from cutaway.models import Transformer
from tests.reference import oracle, tiny
from tests.reference.conftest import open_folder

pytestmark = pytest.mark.usefixtures("capped_oracle", "small_stores")
Folders = Callable[[str], Path]
Note = Callable[[str, str, float], float]
Kind: TypeAlias = dict[str, bool]


@pytest.fixture
def small_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of window + 4, so that 40 tokens go round them, and pages of 4."""
    monkeypatch.setattr(build, "SLACK", 4)
    monkeypatch.setattr(build, "PAGE", 4)
    monkeypatch.setattr(pages, "POISON", True)


def feed(model: Transformer, cache: StoredCache, ids: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([model(part, cache=cache) for part in ids.split(sizes, 1)], 1)


def splits(name: str, n: int) -> list[list[int]]:
    """The stated ones, and some at random."""
    found = [[12, 18, 10], [1, 39]]
    if name in tiny.FAMILIES:
        found += [[39, 1], [5, *[1] * 35]]
    chance = random.Random(name)
    for _ in range(2):
        cuts = sorted(chance.sample(range(1, n), chance.randint(1, 6)))
        found.append([b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)])
    return found


def slides(name: str) -> bool:
    spec = tiny.spec_of(tiny.config(name))
    return any(layer.attention.mask.window for layer in spec.decoder.layers)


KINDS = {
    "ring": {"sliding": True},
    "whole": {"sliding": False},
    "pages": {"sliding": True, "paged": True},
    "pages-of-all": {"sliding": False, "paged": True},
}


def stores(names: Iterable[str]) -> list[Any]:
    """Kinds of cache of each. A model without windows has no rings; pages of most are swept slowly."""
    found = [(name, kind) for name in names for kind in KINDS if "whole" in kind or kind == "pages" or slides(name)]
    slow = [kind.startswith("pages") and name != "gemma3-caps" for name, kind in found]
    marks = [(pytest.mark.slow,) if late else () for late in slow]
    return [
        pytest.param(name, KINDS[kind], marks=mark, id=f"{name}-{kind}")
        for (name, kind), mark in zip(found, marks, strict=True)
    ]


STORES, FAMILY_STORES = stores(tiny.CASES), stores(tiny.FAMILIES)


@pytest.mark.parametrize(("name", "kind"), STORES)
@torch.no_grad()
def test_any_split(name: str, kind: Kind, folder_of: Folders, measured: Note) -> None:
    """Cases K01 and K03. The buffers start at 8 slots, so that they grow on the way."""
    ids = tiny.ids(2, 40)
    model, whole = open_folder(folder_of(name)), oracle.logits(folder_of(name), ids)
    for sizes in splits(name, 40):
        cache = model.new_cache(batch=2, capacity=8, **kind)
        difference = float((feed(model, cache, ids, sizes) - whole).abs().max())
        assert measured(name, "cached", difference) <= 1e-4, sizes
        assert cache.lengths == [40, 40]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "kind"), FAMILY_STORES)
@torch.no_grad()
def test_ragged_rows_then_single_steps(name: str, kind: Kind, side: str, folder_of: Folders, measured: Note) -> None:
    """A padded prompt, then rows that go on together although they stand at different positions (M09)."""
    lengths, width, more = (3, 17, 11), 17, 14
    texts = [tiny.ids(1, n + more, seed=n) for n in lengths]
    alone = [oracle.logits(folder_of(name), text) for text in texts]
    model = open_folder(folder_of(name))
    ids, positions = tiny.ids(3, width, seed=77), torch.full((3, width), -1)
    for row, (n, text) in enumerate(zip(lengths, texts, strict=True)):
        place = slice(width - n, width) if side == "left" else slice(0, n)
        ids[row, place], positions[row, place] = text[0, :n], torch.arange(n)
    cache = model.new_cache(batch=3, capacity=8, **kind)
    first = model(ids, positions=positions, cache=cache)
    assert cache.lengths == list(lengths)
    for row, n in enumerate(lengths):
        logits = first[row][positions[row] >= 0]
        assert measured(name, "cached", float((logits - alone[row][0, :n]).abs().max())) <= 1e-4
    for step in range(more):
        now = torch.stack([text[0, n + step : n + step + 1] for n, text in zip(lengths, texts, strict=True)])
        logits = model(now, cache=cache)
        for row, n in enumerate(lengths):
            assert measured(name, "cached", float((logits[row, 0] - alone[row][0, n + step]).abs().max())) <= 1e-4


@pytest.mark.parametrize(("name", "kind"), FAMILY_STORES)
@torch.no_grad()
def test_rows_picked_out(name: str, kind: Kind, folder_of: Folders, measured: Note) -> None:
    """Case K09: rows 2 and 0 of three go on for five steps, and row 2 twice."""
    ids = tiny.ids(3, 30)
    whole = oracle.logits(folder_of(name), ids)
    model = open_folder(folder_of(name))
    for rows in ([2, 0], [2, 0, 2]):
        cache = model.new_cache(batch=3, capacity=8, **kind)
        model(ids[:, :25], cache=cache)
        cache.select(rows)
        assert cache.lengths == [25] * len(rows)
        after = feed(model, cache, ids[rows, 25:], [1] * 5)
        assert measured(name, "cached", float((after - whole[rows, 25:]).abs().max())) <= 1e-4


@pytest.mark.parametrize(("name", "kind"), FAMILY_STORES)
@torch.no_grad()
def test_rewound(name: str, kind: Kind, folder_of: Folders, measured: Note) -> None:
    """Back over another ending; further than a ring holds, it says 0 and is fed again."""
    ids = tiny.ids(2, 40)
    other = torch.cat([ids[:, :26], tiny.ids(2, 14, seed=3)], 1)
    whole = oracle.logits(folder_of(name), other)
    model = open_folder(folder_of(name))
    windows = any(layer.attention.mask.window for layer in model.spec.decoder.layers)

    cache = model.new_cache(batch=2, capacity=8, **kind)
    feed(model, cache, ids[:, :29], [20, 4, 4, 1])
    assert cache.rewind([26, 26]) == [26, 26]
    after = feed(model, cache, other[:, 26:], [1, 3, 10])
    assert measured(name, "cached", float((after - whole[:, 26:]).abs().max())) <= 1e-4

    cache = model.new_cache(batch=2, capacity=8, **kind)
    feed(model, cache, ids, [36, 4])
    left = cache.rewind([26, 40])
    assert left == [0 if kind["sliding"] and windows else 26, 40]
    assert cache.lengths == left
    # Row 0 is fed again from where it stands; row 1 has nothing to say meanwhile.
    again = torch.cat([other[:1, left[0] :], other[:1, left[0] :]], 0)
    positions = torch.arange(left[0], 40).repeat(2, 1)
    positions[1] = -1
    after = model(again, positions=positions, cache=cache)
    assert measured(name, "cached", float((after[0] - whole[0, left[0] :]).abs().max())) <= 1e-4
    assert cache.lengths == [40, 40]


@pytest.mark.parametrize(("name", "kind"), stores(["llama", "mistral-window", "gemma3", "gemma3-caps", "gpt2"]))
@torch.no_grad()
def test_packed_documents_in_a_cache(name: str, kind: Kind, folder_of: Folders) -> None:
    """Two documents of a row arrive in parts; neither sees the other."""
    documents = [tiny.ids(1, n, seed=n) for n in (11, 9)]
    model = open_folder(folder_of(name))
    whole = torch.cat([oracle.logits(folder_of(name), document) for document in documents], 1)
    ids = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(11), torch.arange(9)])[None]
    segments = torch.tensor([[0] * 11 + [1] * 9])
    for sizes in ([7, 8, 5], [1] * 20, [20]):
        cache = model.new_cache(capacity=8, **kind)
        parts = [
            model(*part, cache=cache)
            for part in zip(ids.split(sizes, 1), positions.split(sizes, 1), segments.split(sizes, 1), strict=True)
        ]
        assert float((torch.cat(parts, 1) - whole).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_explicit_attention_over_a_cache(name: str, folder_of: Folders) -> None:
    ids = tiny.ids(2, 40)
    model, whole = open_folder(folder_of(name)), oracle.logits(folder_of(name), ids)
    model.attention = "explicit"
    cache = model.new_cache(batch=2)
    assert float((feed(model, cache, ids, [12, 18, 1, 9]) - whole).abs().max()) <= 1e-4
