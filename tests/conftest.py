"""Fixtures that every test may use."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path

import pytest
import torch
from jaxtyping import install_import_hook

# Shapes are types, checked in tests: see cutaway.shapes.
install_import_hook(["cutaway.modules", "cutaway.models", "cutaway.cache.mask"], "beartype.beartype")

warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Small models gain nothing from a second thread, and lose much where the second core is busy.
torch.set_num_threads(1)

# Real files that tests marked `real` read. CUTAWAY_TEST_MODELS names a folder that has them; `make models` fills it.
FILES = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


def _models() -> Path:
    from cutaway.checkpoints.home import models_dir

    stated = os.environ.get("CUTAWAY_TEST_MODELS")
    return Path(stated) if stated else models_dir()


def _real(name: str) -> Path:
    path = _models() / name
    assert path.exists(), f"{path} is missing: run `make models` (or leave these out with -m 'not real')"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FILES[name]
    return path


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest):
    """Tests marked `real` take both cores."""
    if request.node.get_closest_marker("real") is None:
        yield
        return
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return _real("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M."""
    return _real("gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="session")
def real_tokenizer():
    """Name (qwen3, llama3, llama2, gemma3, gpt4o) to a folder with its tokenizer.json."""

    def find(name: str) -> Path:
        folder = _models() / "tokenizers" / name
        assert (folder / "tokenizer.json").exists(), f"{folder} is missing: run `make models`"
        return folder

    return find
