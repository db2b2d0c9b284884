"""Fixtures that every test may use."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start; read when torch is imported

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


WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest):
    """Tests marked `real` take two threads, or their worker's share of the cores."""
    if request.node.get_closest_marker("real") is None:
        yield
        return
    torch.set_num_threads(max(1, min(2, (os.cpu_count() or 1) // WORKERS)))
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


# The table of measured differences (tests/reference/conftest.py) under xdist: each worker sends its own when it ends,
# and the controller, which runs no tests, puts them together and prints it.


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker: hand over what was measured here."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    reference = sys.modules.get("tests.reference.conftest")
    if output is not None and reference is not None:
        table = session.config.stash.get(reference.MEASURED, {})
        output["measured"] = [[row, column, value] for (row, column), value in table.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the controller: a worker has ended. One that crashed has sent nothing, and has failed the run."""
    measured = getattr(node, "workeroutput", {}).get("measured")
    if not measured:
        return
    from tests.reference import conftest as reference

    if not node.config.pluginmanager.is_registered(reference):  # it prints the table when all is done
        node.config.pluginmanager.register(reference)
    table = node.config.stash.get(reference.MEASURED, {})
    for row, column, value in measured:
        table[row, column] = max(value, table.get((row, column), 0.0))
    node.config.stash[reference.MEASURED] = dict(sorted(table.items()))
