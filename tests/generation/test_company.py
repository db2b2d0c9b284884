"""Batch = single: ragged batches of 1 to 32 prompts, with each of their rows alone."""

from __future__ import annotations

import os
import random
from pathlib import Path

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


@pytest.mark.parametrize("name", NAMES)
def test_a_few(name: str, tmp_path: Path) -> None:
    """The sweep below in small; bits do differ, or the other half of it, in test_deterministic.py, proves nothing."""
    model = made(name, tmp_path)
    model.transformer.use_kernels(False)
    found = batches(model, 6, deterministic=False, prompt=nonsense(model), alone=3)
    print(f"\n{name}: {found}")
    assert found.ties <= 1
    assert found.differ > 0  # by the readable blocks, without padding


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_three_hundred(name: str, deterministic: bool, tmp_path: Path) -> None:
    """Four rows of each batch are run alone."""
    model = made(name, tmp_path)
    model.transformer.use_kernels(deterministic)  # the library's sums know no company, so nothing would differ
    found = batches(model, TRIALS, deterministic=deterministic, prompt=nonsense(model), alone=4)
    print(f"\n{name}, {'deterministic' if deterministic else 'usual'}: {found}")
    assert (found.differ == 0) is deterministic
    assert found.ties <= found.rows // 500 + 1


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("deterministic", [False, True])
def test_three_hundred_with_smollm2(smollm2_path: Path, deterministic: bool) -> None:
    """Pieces of texts and random ids, mostly short; one row of each batch is run alone."""
    model = cutaway.load(smollm2_path, dtype="float32")
    model.transformer.use_kernels(deterministic)  # the library's sums know no company, so nothing would differ
    assert model.tokenizer is not None
    texts = [ids for text in PROMPTS if (ids := model.tokenizer.encode(text))]
    random_ids = nonsense(model)

    def prompt(chance: random.Random, n: int) -> list[int]:
        if chance.random() < 0.5:
            return random_ids(chance, n)
        ids = chance.choice(texts)
        start = chance.randrange(len(ids))
        return ids[start : start + n]

    lengths = (8, 8, 8, 40)
    found = batches(model, TRIALS, deterministic=deterministic, prompt=prompt, longest=lengths, alone=1, max_tokens=3)
    print(f"\nSmolLM2, {'deterministic' if deterministic else 'usual'}: {found}")
    assert (found.differ == 0) is deterministic
    assert found.ties <= found.rows // 100 + 1
