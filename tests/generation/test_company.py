"""Batch = single: ragged batches of 1 to 32 prompts, with each of their rows alone."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cutaway
from cutaway.model import Model
from tests.generation.company import batches, nonsense
from tests.reference import tiny
from tests.reference.prompts import PROMPTS

# Windows and caps, ALiBi, learned positions, norms of queries and keys: what a neighbour could disturb.
NAMES = ("llama", "gemma3", "bloom", "gpt2", "phi-qk-norm", "mistral-window")
TRIALS = int(os.environ.get("CUTAWAY_TRIALS", "300"))


def made(name: str, folder: Path) -> Model:
    return cutaway.load(tiny.write(tiny.config(name), folder / name))


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_few(name: str, tmp_path: Path) -> None:
    """The sweep below in small; bits do differ, or the other half of it, in test_deterministic.py, proves nothing."""
    model = made(name, tmp_path)
    model.transformer.use_kernels(False)
    found = batches(model, 4, deterministic=False, prompt=nonsense(model), alone=3)
    print(f"\n{name}: {found}")
    assert found.ties <= 1
    assert found.differ > 0  # by the readable blocks, without padding


@dataclass(frozen=True)
class Way:
    """How a batch is computed: by the native library or the readable blocks, with the promise or without."""

    kernels: bool
    deterministic: bool

    def check(self, model: Model, **how: Any) -> None:
        """Batches against their rows, and the inverse: without kernels and promise, bits must differ."""
        model.transformer.use_kernels(self.kernels)
        found = batches(model, TRIALS, deterministic=self.deterministic, **how)
        print(f"\n{self}: {found}")
        if self.deterministic:
            assert found.differ == 0
        elif not self.kernels:
            assert found.differ > 0
        assert found.ties <= found.rows // 100 + 1


WAYS = [Way(kernels, promise) for kernels in (True, False) for promise in (False, True)]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_three_hundred(name: str, way: Way, tmp_path: Path) -> None:
    """Four rows of each batch are run alone."""
    model = made(name, tmp_path)
    way.check(model, prompt=nonsense(model), alone=4)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_three_hundred_with_smollm2(smollm2_path: Path, way: Way) -> None:
    """Pieces of texts and random ids, mostly short; one row of each batch is run alone."""
    model = cutaway.load(smollm2_path, dtype=None if way.kernels else "float32")
    assert model.tokenizer is not None
    texts = [ids for text in PROMPTS if (ids := model.tokenizer.encode(text))]
    random_ids = nonsense(model)

    def prompt(chance: random.Random, n: int) -> list[int]:
        if chance.random() < 0.5:
            return random_ids(chance, n)
        ids = chance.choice(texts)
        start = chance.randrange(len(ids))
        return ids[start : start + n]

    way.check(model, prompt=prompt, longest=(8, 8, 8, 40), alone=1, max_tokens=3)
