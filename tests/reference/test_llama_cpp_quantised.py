"""Quantized files beside llama.cpp's own: the same types, the same bytes or no larger errors; and it reads ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cutaway
from cutaway.formats.gguf import GgufFile
from cutaway.formats.mixes import FILE_TYPES, MIXES
from cutaway.model import Model
from tests.reference import llama_cpp_quantise, tiny
from tests.reference.test_llama_cpp import ask, greedy

pytestmark = pytest.mark.oracle
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE |= {"vocab_size": 256, "head_dim": 64}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def theirs(jobs: list[dict[str, Any]]) -> None:
    """Let llama.cpp quantize files."""
    python = os.environ.get("CUTAWAY_LLAMA_CPP_PYTHON", sys.executable)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, llama_cpp_quantise.__file__]
    run = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-800:]


def types(path: Path) -> dict[str, str]:
    with GgufFile(path) as file:
        return {name: info.type.name for name, info in file.tensors.items()}


def llama(**changes: Any) -> Model:
    values = {**tiny.config("llama"), **WIDE, **changes}
    return Model(tiny.transformer(values))


# Where rows are narrow, what takes a K type's place still tells which it was.
MODELS = {
    "whole blocks": lambda: llama(num_hidden_layers=5, tie_word_embeddings=True),
    "16 layers": lambda: llama(**SMALL, num_hidden_layers=16, tie_word_embeddings=False),
    "17 layers, tied": lambda: llama(**SMALL, num_hidden_layers=17, tie_word_embeddings=True),
    "80 layers, shared keys": lambda: llama(**SMALL, num_hidden_layers=80),
    "one fused matrix": lambda: Model(tiny.transformer({**tiny.config("gpt2"), "n_layer": 9})),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_types(name: str, tmp_path: Path) -> None:
    """Of every tensor, for every mix and for K types alone."""
    model = MODELS[name]()
    cutaway.save(model, tmp_path / "plain.gguf", format="gguf")
    jobs = [
        {"source": str(tmp_path / "plain.gguf"), "out": str(tmp_path / f"{kind}.theirs"), "type": FILE_TYPES[kind]}
        | {"pure": kind not in MIXES}
        for kind in (*MIXES, "Q4_K", "Q5_K", "Q6_K")
    ]
    theirs(jobs)
    for kind in (*MIXES, "Q4_K", "Q5_K", "Q6_K"):
        cutaway.save(model, tmp_path / f"{kind}.gguf", format="gguf", quantize=kind)
        assert types(tmp_path / f"{kind}.gguf") == types(tmp_path / f"{kind}.theirs"), kind
        with GgufFile(tmp_path / f"{kind}.gguf") as ours, GgufFile(tmp_path / f"{kind}.theirs") as other:
            for key in ("general.file_type", "general.quantization_version"):
                assert ours.metadata[key] == other.metadata[key]
            with GgufFile(tmp_path / "plain.gguf") as file:
                for tensor, info in ours.tensors.items():
                    if info.type.block == 256:
                        x = file.read(tensor)
                        a, b = (float((f.read(tensor) - x).square().sum()) for f in (ours, other))
                        assert a <= b, (kind, tensor)


def test_the_same_bytes(tmp_path: Path) -> None:
    """Types of 32 numbers."""
    model = llama(num_hidden_layers=2)
    cutaway.save(model, tmp_path / "plain.gguf", format="gguf")
    kinds = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
    theirs(
        [
            {
                "source": str(tmp_path / "plain.gguf"),
                "out": str(tmp_path / kind),
                "type": FILE_TYPES[kind],
                "pure": True,
            }
            for kind in kinds
        ]
    )
    for kind in kinds:
        cutaway.save(model, tmp_path / f"{kind}.gguf", format="gguf", quantize=kind)
        with GgufFile(tmp_path / f"{kind}.gguf") as ours, GgufFile(tmp_path / kind) as other:
            for name in ours.names():
                assert np.array_equal(ours.raw(name), other.raw(name)), (kind, name)


@pytest.mark.real
def test_llama_cpp_reads_them(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2 in four types. llama.cpp rounds what it multiplies to 8 bits there: where its token is another one, its
    two best stood near each other, and all logits lie near ours."""
    loaded = cutaway.load(smollm2_path)
    assert loaded.tokenizer is not None
    texts = ["The Eiffel Tower is in", "Once upon a time there was", "def fibonacci(n):\n", "Water boils at"]
    rows = loaded.tokenizer.encode_batch(texts)
    kinds = ("q8_0", "q4_0", "q4_k", "q6_k")
    jobs = []
    for kind in kinds:
        cutaway.save(loaded, tmp_path / f"{kind}.gguf", format="gguf", quantize=kind)
        jobs.append({"path": str(tmp_path / f"{kind}.gguf"), "prompts": rows, "texts": texts, "n": 24})
    said = []
    for kind, answer in zip(kinds, ask(jobs), strict=True):
        model = cutaway.load(tmp_path / f"{kind}.gguf")
        assert answer["ids"] == rows
        same, apart, leads = 0, 0.0, [0.0]
        for row, tokens, lead, logits in zip(rows, answer["tokens"], answer["leads"], answer["logits"], strict=True):
            ours = greedy(model, row)
            first = next((i for i, (a, b) in enumerate(zip(ours, tokens, strict=True)) if a != b), 24)
            same += first
            leads += [lead[first]] if first < 24 else []
            wanted = model.logits(row)[0, -1]  # type: ignore[index]
            apart = max(apart, float((wanted - torch.tensor(logits)).norm() / wanted.norm()))
        said.append(
            f"{kind}: {same} of {24 * len(rows)} tokens before another; leads there {max(leads):.3f}; {apart:.4f}"
        )
        assert max(leads) < 0.5, said[-1]
        assert apart < 0.15, said[-1]
    with capsys.disabled():
        print("", *said, sep="\n")
