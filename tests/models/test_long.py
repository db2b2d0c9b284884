"""No family makes a number for each pair of tokens of a long text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.reference import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cutaway.cache import mask as mask_module
from cutaway.models import Transformer
from cutaway.modules import attend as attend_module
from cutaway.spec import AttentionSpec, BlockSpec, BranchSpec, LearnedPositions

ROOT = Path(__file__).parents[2]


def shrunk(name: str, n: int) -> Transformer:
    """A family's kinds of layer once each, on two heads, with positions up to ``n``."""
    spec = tiny.spec_of(tiny.config(name))

    def fewer(branch: BranchSpec) -> BranchSpec:
        body = branch.body
        if isinstance(body, AttentionSpec):
            body = replace(body, n_heads=2, n_kv_heads=1)
        return replace(branch, body=body)

    kinds: list[BlockSpec] = []
    for layer in dict.fromkeys(spec.decoder.layers):
        kinds.append(replace(layer, branches=tuple(fewer(branch) for branch in layer.branches)))
    embedding = spec.embedding
    if isinstance(embedding.positions, LearnedPositions):
        embedding = replace(embedding, positions=LearnedPositions(n + embedding.positions.offset))
    decoder = replace(spec.decoder, layers=tuple(dict.fromkeys(kinds)))
    model = Transformer(replace(spec, decoder=decoder, embedding=embedding))
    tiny.scale_randomly(model, norm_mean=tiny.norm_mean(tiny.config(name)))
    return model.eval()


class Largest(TorchDispatchMode):
    """Notes the most numbers that any operation's result holds."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("how", ["fused", "blockwise"])
@pytest.mark.parametrize("name", tiny.FAMILIES)
@torch.no_grad()
def test_no_square(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mask_module, attend_module):
        monkeypatch.setattr(module, "LARGEST_MASK", 1 << 15)
    n = 1500
    model = shrunk(name, n)
    model.attention = how  # type: ignore[assignment]
    with Largest() as largest:
        assert model.hidden(tiny.ids(1, n)).isfinite().all()
    assert largest.numel < n * n // 4


MEASURE = """
import sys, torch
from tests.models.test_long import shrunk
from tests.reference import tiny

def memory(word):
    line = next(line for line in open("/proc/self/status") if line.startswith(word))
    return int(line.split()[1]) / 1024

torch.set_num_threads(1)
name, how, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = shrunk(name, n)
model.attention = how
ids = tiny.ids(1, n)
with torch.no_grad():
    model.hidden(ids[:, :100])
    open("/proc/self/clear_refs", "w").write("5")  # the peak is measured from here
    before = memory("VmRSS")
    assert model.hidden(ids).isfinite().all()
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured as Linux tells it")
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_memory_for_thirty_thousand_tokens(name: str) -> None:
    """Measured: their pairs would take 900 MB even as booleans, for one head.

    Freed blocks go back at once, so that tensors are measured and not how the heap fell to pieces (110 MB for Gemma 2,
    against 190 to 310 from run to run).
    """
    command = [sys.executable, "-c", MEASURE, name, "fused", "30000"]
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    run = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    print(f"{name}: {float(run.stdout):.0f} MB")
    assert float(run.stdout) < 200


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(10_800)  # 37 thousand billion operations
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured as Linux tells it")
def test_thirty_thousand_tokens_of_a_real_model(smollm2_path: Path) -> None:
    """Within 4 GiB beyond the weights; and that it was trained for fewer is said."""
    command = [sys.executable, str(ROOT / "benchmarks/long_prompt.py"), str(smollm2_path), "30000"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    found = re.search(r"at most ([0-9.]+) GiB beyond", run.stdout)
    assert found is not None
    assert float(found[1]) < 4
    assert "30000 tokens are more than the 8192 this model was trained for" in run.stdout
