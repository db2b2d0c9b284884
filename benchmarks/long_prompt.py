"""What a long prompt takes: memory beyond the weights, at its peak, and time.

python benchmarks/long_prompt.py [MODEL] [TOKENS] [KIND]     KIND: plain, int8, paged or int8-paged
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import torch

import cutaway
from cutaway.cache import KvDtype
from cutaway.generation.session import Session

ROOT = Path(__file__).parents[1]
WARM = 64  # tokens read before the measurement, so that what is loaded once does not count


def memory(word: str) -> float:
    """A line of Linux's account of this process, in GiB: VmRSS is what it holds, VmHWM the most it has held."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) / 2**20


def main() -> None:
    """Print the cost."""
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    n = int(sys.argv[2]) if len(sys.argv) > 2 else 30_000
    kind = sys.argv[3] if len(sys.argv) > 3 else "plain"
    model = cutaway.load(name)
    assert model.tokenizer is not None
    text = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    ids = model.tokenizer.encode(text[: 12 * n])[:n]
    assert len(ids) == n, "more tokens than this repository has"
    kv_dtype: KvDtype | None = "int8" if "int8" in kind else None
    Session(model.transformer, kv_dtype=kv_dtype, paged="paged" in kind).feed([ids[:WARM]])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before, start = memory("VmRSS"), time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        logits = Session(model.transformer, kv_dtype=kv_dtype, paged="paged" in kind).feed([ids])
    took, most = time.perf_counter() - start, memory("VmHWM") - before
    assert bool(torch.isfinite(logits).all())
    print(f"{name}, {n:,} tokens, {kind}, {torch.get_num_threads()} threads")
    print(f"at most {most:.2f} GiB beyond the {before:.2f} GiB of weights and program")
    print(f"{took:.1f} s, {n / took:,.0f} tokens/s")
    print("said: " + ("nothing" if not said else str(said[0].message)))


if __name__ == "__main__":
    main()
