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
from tests.reference.test_llama_cpp import ask

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


def mixture(**changes: Any) -> Model:
    return Model(tiny.transformer({**tiny.config("mixtral"), **SMALL, "vocab_size": 256, **changes}))


def qwen(**changes: Any) -> Model:
    values = {**tiny.config("qwen3-moe"), "norm_topk_prob": True, **SMALL, "moe_intermediate_size": 32}
    return Model(tiny.transformer({**values, "vocab_size": 256, **changes}))


# Where rows are narrow, what takes a K type's place still tells which it was.
MODELS = {
    "whole blocks": lambda: llama(num_hidden_layers=5, tie_word_embeddings=True),
    "16 layers": lambda: llama(**SMALL, num_hidden_layers=16, tie_word_embeddings=False),
    "17 layers, tied": lambda: llama(**SMALL, num_hidden_layers=17, tie_word_embeddings=True),
    "80 layers, shared keys": lambda: llama(**SMALL, num_hidden_layers=80),
    "five experts": lambda: mixture(num_hidden_layers=9),
    "eight experts, which llama.cpp treats otherwise": lambda: mixture(num_hidden_layers=9, num_local_experts=8),
    "six small experts": lambda: qwen(num_hidden_layers=9),
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
def test_the_default_model(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2, by both from the same file: equal bytes and so equal answers, or K types with no larger errors.

    llama.cpp rounds what it multiplies by blocks to 8 bits: its logits are apart from the exact ones. With our K types
    they are no further than with its own.
    """
    loaded = cutaway.load(smollm2_path)
    assert loaded.tokenizer is not None
    texts = ["The Eiffel Tower is in", "Once upon a time there was"]
    rows = loaded.tokenizer.encode_batch(texts)
    kinds, numbers = ("Q8_0", "Q4_0", "Q4_K", "Q6_K"), {"Q4_K": 15}
    ours, other = ({kind: tmp_path / f"{kind}{end}" for kind in kinds} for end in (".gguf", ".theirs.gguf"))
    for kind in kinds:
        cutaway.save(loaded, ours[kind], format="gguf", quantize=kind, verify=False)
    theirs(
        [
            {"source": str(smollm2_path), "out": str(other[kind]), "type": numbers.get(kind, FILE_TYPES[kind])}
            | {"pure": True, "again": True}
            for kind in kinds
        ]
    )
    asked = [path for kind in kinds for path in (ours[kind], other[kind])]
    found = ask([{"path": str(path), "prompts": rows, "texts": texts, "n": 12} for path in asked])
    answers = dict(zip(asked, found, strict=True))
    said = []
    with GgufFile(smollm2_path) as source:
        for kind in kinds:
            _compare(source, ours[kind], other[kind])
            mine, its = answers[ours[kind]], answers[other[kind]]
            assert mine["ids"] == rows
            if not kind.endswith("K"):
                assert mine == its
            apart = [_apart(path, rows, answers[path]["logits"]) for path in (ours[kind], other[kind])]
            agreed = sum(
                a == b
                for one, two in zip(mine["tokens"], its["tokens"], strict=True)
                for a, b in zip(one, two, strict=True)
            )
            said.append(
                f"{kind}: {agreed} of {12 * len(rows)} tokens as of its own file; logits {apart[0]:.3f}, {apart[1]:.3f}"
            )
            assert apart[0] <= 1.5 * apart[1], said[-1]
    with capsys.disabled():
        print("", *said, sep="\n")


def _compare(source: GgufFile, ours: Path, other: Path) -> None:
    """The same types; the same bytes where blocks have one right answer, no larger error where they have not."""
    with GgufFile(ours) as a, GgufFile(other) as b:
        assert types(ours) == types(other)
        for name, info in a.tensors.items():
            if info.type.block < 256:
                assert np.array_equal(a.raw(name), b.raw(name)), name
                continue
            x = source.read(name)
            errors = [float((file.read(name) - x).square().sum()) for file in (a, b)]
            assert errors[0] <= errors[1], name


def _apart(path: Path, rows: list[list[int]], logits: list[list[float]]) -> float:
    """How far llama.cpp's logits after prompts lie from the exact ones of the same file, as a share of them."""
    model = cutaway.load(path)
    exact = [model.logits(row)[0, -1] for row in rows]  # type: ignore[index]
    return max(float((one - torch.tensor(other)).norm() / one.norm()) for one, other in zip(exact, logits, strict=True))
