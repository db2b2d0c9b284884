"""What llama.cpp makes of the files that we write: the same greedy tokens, and the same ids of a text.

llama-cpp-python is asked in a process of its own: in the interpreter that CUTAWAY_LLAMA_CPP_PYTHON names, or in this
one. ``make oracles`` installs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.model import Model
from tests.checkpoints import gguf_models
from tests.reference import llama_cpp_greedy
from tests.tokenizers.texts import random_texts

pytestmark = pytest.mark.oracle

N, NEAR = 24, 1e-3
NOTE = Callable[[str, str, float], float]
# llama.cpp's GELU is a table of half-precision numbers.
LOGITS = {"gemma3": 1e-2, "gpt2": 1e-2, "qwen": 1e-4, "llama": 1e-4, "mixtral": 1e-4}


def ask(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """llama.cpp's answers."""
    python = os.environ.get("CUTAWAY_LLAMA_CPP_PYTHON", sys.executable)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(
        [python, llama_cpp_greedy.__file__], input=json.dumps(jobs), capture_output=True, text=True, env=environment
    )
    hint = "`make oracles`, or leave these out with -m 'not oracle'"
    assert run.returncode == 0, f"{python} cannot run llama_cpp ({hint}): {run.stderr[-800:]}"
    return [json.loads(line) for line in run.stdout.splitlines()]


def prompts(model: Model) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    size = model.tokenizer.vocab_size  # type: ignore[union-attr]
    return [torch.randint(5, size, (n,), generator=generator).tolist() for n in (1, 9, 40)]


def greedy(model: Model, prompt: list[int]) -> list[int]:
    """Token by token with our cache, to the end whatever the tokens are."""
    found: list[int] = []
    with torch.no_grad():
        cache = model.transformer.new_cache()
        logits = model.transformer(torch.tensor([prompt]), cache=cache)[0, -1]
        for _ in range(N):
            found.append(int(logits.argmax()))
            logits = model.transformer(torch.tensor([found[-1:]]), cache=cache)[0, -1]
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Model, dict[str, Any]]]:
    """Every case, written once and asked in one process."""
    folder = tmp_path_factory.mktemp("gguf")
    made, jobs = {}, []
    for name in gguf_models.CASES:
        made[name] = model = gguf_models.model(name, exact=False)
        cutaway.save(model, folder / f"{name}.gguf", format="gguf")
        texts = [text for text in random_texts(40, seed=3) if text and "\0" not in text]
        jobs.append({"path": str(folder / f"{name}.gguf"), "prompts": prompts(model), "texts": texts, "n": N})
    return {name: (made[name], job | answer) for name, job, answer in zip(made, jobs, ask(jobs), strict=True)}


@pytest.mark.parametrize("name", gguf_models.CASES)
def test_same_greedy_tokens(
    name: str, answers: dict[str, tuple[Model, dict[str, Any]]], measured: NOTE, capsys: pytest.CaptureFixture[str]
) -> None:
    """Identical, unless the two best logits are nearer than 1e-3 at a step; those are counted and printed."""
    model, answer = answers[name]
    near = 0
    for prompt, theirs, leads, logits in zip(
        answer["prompts"], answer["tokens"], answer["leads"], answer["logits"], strict=True
    ):
        near += sum(lead < NEAR for lead in leads)
        ours = greedy(model, prompt)
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), N)
        assert first == N or leads[first] < NEAR, f"step {first}: lead {leads[first]}"
        apart = (model.logits(prompt)[0, -1] - torch.tensor(logits)).abs().max()  # type: ignore[index]
        most = next(value for start, value in LOGITS.items() if name.startswith(start))
        assert measured(name, "llama.cpp", float(apart)) <= most
    with capsys.disabled():
        if near:
            print(f"\n{name}: {near} near-ties in {N * len(answer['prompts'])} steps")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_same_ids(name: str, answers: dict[str, tuple[Model, dict[str, Any]]]) -> None:
    model, answer = answers[name]
    assert model.tokenizer is not None
    assert answer["ids"] == model.tokenizer.encode_batch(answer["texts"])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_loads(dtype: str, tmp_path: Path) -> None:
    """There llama.cpp rounds what it multiplies as well, so that only the numbers' sizes can be compared."""
    names = ("llama", "qwen3", "gemma3", "gpt2")
    jobs, made = [], []
    for name in names:
        made.append(gguf_models.model(name))
        cutaway.save(made[-1], tmp_path / f"{name}.gguf", format="gguf", dtype=dtype)
        jobs.append({"path": str(tmp_path / f"{name}.gguf"), "prompts": prompts(made[-1]), "texts": [], "n": 1})
    for name, model, job, answer in zip(names, made, jobs, ask(jobs), strict=True):
        for prompt, logits in zip(job["prompts"], answer["logits"], strict=True):  # type: ignore[call-overload]
            ours, theirs = model.logits(prompt)[0, -1], torch.tensor(logits)  # type: ignore[index]
            assert float((ours - theirs).norm() / ours.norm()) < 0.1, name


@pytest.mark.real
def test_the_default_model(smollm2_path: Path, tmp_path: Path) -> None:
    """SmolLM2, its blocks taken apart and written again in fp32: its own words, in both."""
    model = cutaway.load(smollm2_path)
    cutaway.save(model, tmp_path / "m.gguf", format="gguf", dtype="fp32")
    assert model.tokenizer is not None
    texts = ["The Eiffel Tower is in", "  def f(x):\n\treturn 12345", "naïve 🙂 東京"]
    rows = model.tokenizer.encode_batch(texts)
    (answer,) = ask([{"path": str(tmp_path / "m.gguf"), "prompts": rows, "texts": texts, "n": N}])
    assert answer["ids"] == rows
    for row, theirs, leads in zip(rows, answer["tokens"], answer["leads"], strict=True):
        ours = greedy(model, row)
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), N)
        assert first == N or leads[first] < NEAR
