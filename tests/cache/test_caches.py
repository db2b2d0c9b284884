"""One promise for every cache: any split of a text over calls, any padding, any batch neighbours,
rewinds and selections equal one plain pass."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import tiny
from torch import Tensor

from cutaway.cache import StoredCache, build, pages
from cutaway.models import Transformer
from cutaway.spec import MaskRule

SLACK, WINDOWS = 3, (5, None, 3, 5)
N_IDS = 64
KINDS = [{"sliding": sliding, "paged": paged} for sliding in (True, False) for paged in (False, True)]
NAMES = ["ring", "pages-of-windows", "whole", "pages"]
kinds = pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[2], KINDS[3]], ids=NAMES)


def small(patch: pytest.MonkeyPatch) -> None:
    """Rings, windows' pages and pages so small that little text goes beyond them; what is given back is spoilt."""
    patch.setattr(build, "SLACK", SLACK)
    patch.setattr(build, "PAGE", 4)
    patch.setattr(pages, "POISON", True)


def _model() -> Transformer:
    """Layers with two windows and without one, so that three stores run side by side."""
    values = {**tiny.config("llama"), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": len(WINDOWS)}
    spec = tiny.spec_of(values)

    def windowed(layer, window):  # type: ignore[no-untyped-def]
        attn, mlp = layer.branches
        body = replace(attn.body, mask=MaskRule(window=window))
        return replace(layer, branches=(replace(attn, body=body), mlp))

    layers = tuple(windowed(layer, window) for layer, window in zip(spec.decoder.layers, WINDOWS, strict=True))
    model = Transformer(replace(spec, decoder=replace(spec.decoder, layers=layers)))
    tiny.scale_randomly(model, norm_mean=1.0)
    return model.eval()


MODEL = _model()


@dataclass
class Row:
    """What a row has been fed, and what came out."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    highest: int = 0  # since it was last empty

    def copy(self) -> Row:
        return Row(list(self.ids), list(self.positions), list(self.documents), list(self.logits), self.highest)

    def add(self, token: int, new_document: bool) -> None:
        fresh = not self.ids or new_document
        self.documents.append(self.documents[-1] + new_document if self.ids else 0)
        self.positions.append(0 if fresh else self.positions[-1] + 1)
        self.ids.append(token)
        self.highest = max(self.highest, len(self.ids))

    def check(self) -> None:
        """Against a plain pass over what is there."""
        if not self.ids:
            return
        segments = torch.tensor([self.documents])
        plain = MODEL(torch.tensor([self.ids]), torch.tensor([self.positions]), segments)
        assert float((plain[0] - torch.stack(self.logits)).abs().max()) <= 1e-4


class Machine:
    """A cache and what it ought to hold."""

    def __init__(self, chance: random.Random, batch: int, kind: dict[str, bool], documents: bool) -> None:
        self.chance = chance
        self.kind = kind
        self.documents = documents
        self.rows = [Row() for _ in range(batch)]
        self.cache: StoredCache = MODEL.new_cache(batch=batch, capacity=4, **kind)

    def feed(self, most: int) -> None:
        """Some tokens for each row, at any places of a width."""
        counts = [self.chance.randint(0, most) for _ in self.rows]
        width = max(1, *counts) + self.chance.randint(0, 2)
        ids = torch.tensor([[self.chance.randrange(N_IDS) for _ in range(width)] for _ in self.rows])
        positions, segments = torch.full_like(ids, -1), torch.zeros_like(ids)
        places = []
        for i, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            left = self.chance.choice([0, width - count])
            place = self.chance.choice(
                [list(range(left, left + count)), sorted(self.chance.sample(range(width), count))]
            )
            for at in place:
                row.add(int(ids[i, at]), self.documents and self.chance.random() < 0.15)
                positions[i, at], segments[i, at] = row.positions[-1], row.documents[-1]
            places.append(place)
        anything = any(row.documents and row.documents[-1] for row in self.rows)
        logits = MODEL(ids, positions, segments if anything else None, self.cache)
        assert logits.isfinite().all()
        for i, (row, place) in enumerate(zip(self.rows, places, strict=True)):
            row.logits += list(logits[i, place])

    def rewind(self) -> None:
        """Each row to some length, often near its end."""
        near = [max(0, len(row.ids) - self.chance.randint(0, SLACK)) for row in self.rows]
        wanted = [
            self.chance.choice([n, self.chance.randint(0, len(row.ids) + 1)])
            for n, row in zip(near, self.rows, strict=True)
        ]
        left = self.cache.rewind(wanted)
        for row, want, now in zip(self.rows, wanted, left, strict=True):
            want = min(want, len(row.ids))
            if not self.kind["sliding"] or row.highest - want <= SLACK:
                assert now == want
            assert now in (want, 0)
            if now < len(row.ids):
                row.check()
            for part in (row.ids, row.positions, row.documents, row.logits):
                del part[now:]
            row.highest = row.highest if now else 0

    def select(self) -> None:
        rows = [self.chance.randrange(len(self.rows)) for _ in range(self.chance.randint(1, 3))]
        self.cache.select(rows)
        self.rows = [self.rows[row].copy() for row in rows]

    def join(self) -> None:
        self.cache.join(1)
        self.rows.append(Row())

    def leave(self) -> None:
        """Perhaps the last one; then another comes."""
        gone = self.chance.randrange(len(self.rows))
        self.cache.select([row for row in range(len(self.rows)) if row != gone])
        del self.rows[gone]
        if not self.rows:
            self.join()

    def fork(self) -> None:
        """The fork goes on, or the original does, while the other reads something else."""
        rows = [self.chance.randrange(len(self.rows)) for _ in range(self.chance.randint(1, 3))]
        other = self.cache.fork(rows)
        if self.chance.random() < 0.5:
            self.rows = [self.rows[row].copy() for row in rows]
            self.cache, other = other, self.cache
        noise = torch.randint(N_IDS, (len(other.lengths), self.chance.randint(1, 12)))
        MODEL(noise, cache=other)
        other.rewind([0] * len(other.lengths))
        MODEL(noise, cache=other)

    def save(self) -> None:
        state = {name: tensor.clone() for name, tensor in self.cache.state().items()}
        self.cache = MODEL.new_cache(batch=len(self.rows), capacity=1, **self.kind)
        self.cache.restore(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in self.cache.state().items())

    def check(self) -> None:
        assert self.cache.lengths == [len(row.ids) for row in self.rows]
        for row in self.rows:
            row.check()


@given(
    seed=st.integers(0, 10**9),
    kind=st.sampled_from(KINDS),
    documents=st.booleans(),
    steps=st.lists(
        st.sampled_from(["feed 2", "feed 1", "feed 14", "rewind", "select", "fork", "save", "join", "leave"]),
        min_size=2,
        max_size=9,
    ),
)
@settings(max_examples=80, deadline=None, derandomize=True)
@torch.no_grad()
def test_a_cache_is_a_plain_pass(seed: int, kind: dict[str, bool], documents: bool, steps: list[str]) -> None:
    """Pages are of four tokens here, and NaN when they are given back: nobody reads them any more (T27)."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        machine = Machine(random.Random(seed), seed % 3 + 1, kind, documents)
        for step in steps:
            word, *most = step.split()
            getattr(machine, word)(*map(int, most))
            assert machine.cache.lengths == [len(row.ids) for row in machine.rows]
        machine.check()


@kinds
@torch.no_grad()
def test_rewinding_twice(kind: dict[str, bool]) -> None:
    """What a ring has lost it has lost, also after a step that made it shorter in between."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        cache = MODEL.new_cache(capacity=4, **kind)
    ids = tiny.ids(1, 20)
    MODEL(ids, cache=cache)
    assert cache.rewind([17]) == [17]
    MODEL(ids[:, 17:18], cache=cache)
    left = cache.rewind([15])[0]
    assert left in ((0,) if kind == KINDS[0] else (15,))
    positions = torch.arange(left, 20)[None]
    again = MODEL(ids[:, left:], positions, cache=cache)
    assert float((again - MODEL(ids)[:, left:]).abs().max()) <= 1e-4


@kinds
@torch.no_grad()
def test_what_was_rewound_is_gone(kind: dict[str, bool]) -> None:
    """Another document in the place of one that was taken back does not meet what is left of it in storage."""
    cache = MODEL.new_cache(batch=2, capacity=4, **kind)
    ids = tiny.ids(2, 12)
    positions = torch.tensor([[*range(7), *range(5)], [*range(12)]])
    segments = torch.tensor([[0] * 7 + [1] * 5, [0] * 12])
    MODEL(ids, positions, segments, cache)
    assert cache.rewind([6, 12]) == [6, 12]
    new = tiny.ids(2, 3, seed=8)
    at = torch.tensor([[0, 1, 2], [12, 13, 14]])
    got = MODEL(new, at, torch.tensor([[1] * 3, [0] * 3]), cache)
    assert float((got[:1] - MODEL(new[:1])).abs().max()) <= 1e-4
    whole = MODEL(torch.cat([ids[1:], new[1:]], 1))
    assert float((got[1:] - whole[:, 12:]).abs().max()) <= 1e-4


@kinds
@torch.no_grad()
def test_pieces_with_a_gap_are_read_again(kind: dict[str, bool]) -> None:
    """Case K08: of ``a b c d e f g h j``, ``a b e f h j`` can keep ``a b``: what comes after a gap is another text.

    A cache has no call that moves a key to another position or takes one out of the middle (docs/decisions/0002).
    """
    a, b, c, d, e, f, g, h, j = range(10, 19)
    old, new = torch.tensor([[a, b, c, d, e, f, g, h, j]]), torch.tensor([[a, b, e, f, h, j]])
    cache = MODEL.new_cache(capacity=4, **kind)
    MODEL(old, cache=cache)
    assert cache.rewind([2]) == [2]
    reused = MODEL(new[:, 2:], cache=cache)
    fresh = MODEL(new)
    assert float((reused - fresh[:, 2:]).abs().max()) <= 1e-4
    assert cache.lengths == [6]
    longer = torch.tensor([[g, a, c]])
    assert float((MODEL(longer, cache=cache) - MODEL(torch.cat([new, longer], 1))[:, 6:]).abs().max()) <= 1e-4
    # What is known of j from before the gap closed is not nearly what it is now.
    assert float((MODEL(old)[:, -1] - fresh[:, -1]).abs().max()) > 0.1


def test_a_ring_is_no_larger_than_it_need_be() -> None:
    """However much is fed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SLACK", SLACK)
        cache, whole = (MODEL.new_cache(capacity=4, sliding=sliding) for sliding in (True, False))

    width = 2 * MODEL.spec.decoder.layers[0].attention.d_head * 2 * 4
    with torch.no_grad():
        for part in tiny.ids(1, 60).split(20, 1):
            MODEL(part, cache=cache)
            MODEL(part, cache=whole)
    assert whole.nbytes >= 4 * 60 * width
    assert cache.nbytes <= whole.nbytes / 4 + 3 * (5 + SLACK + 1) * width


def test_the_bytes_are_those_of_keys_and_values() -> None:
    """Case P01: kv heads × head width, not query heads or hidden size."""
    model = tiny.transformer("qwen3")  # 3 layers, 1 kv head of 32, hidden 56
    cache = model.new_cache(batch=2, capacity=99)
    assert cache.nbytes == 2 * (99 + 1) * 3 * 2 * 1 * 32 * 4
