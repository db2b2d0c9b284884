"""cutaway."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

out = sys.stdout
sys.stdout = sys.stderr

import torch  # noqa: E402
from stage import peak, play  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
imported = peak()
import cutaway  # noqa: E402
from cutaway.kernels import missing  # noqa: E402

words = json.loads(sys.argv[1])
began = time.perf_counter()
model = cutaway.load(words["path"], dtype=words.get("dtype"))
loaded = time.perf_counter() - began
options = {"deterministic": True} if words.get("deterministic") else {}


def decode(prompt: list[int], n: int, rows: int = 1) -> dict[str, Any]:
    """Read a prompt and write n tokens greedily, in several equal rows or in one."""
    began = time.perf_counter()
    first = None
    if rows == 1:
        stream = model.stream(prompt, max_tokens=n, min_tokens=n, temperature=0, **options)
        for _ in stream._run:
            first = first or time.perf_counter()
        tokens = [stream.result.tokens]
    else:
        prompts = [[*prompt[:-1], 1000 + i] for i in range(rows)]
        tokens = [one.tokens for one in model.generate(prompts, max_tokens=n, min_tokens=n, temperature=0, **options)]
    ended = time.perf_counter()
    return {"seconds": ended - began, "first": (first or ended) - began, "tokens": tokens, "peak": peak()}


def prefill(prompt: list[int]) -> dict[str, Any]:
    """Read a prompt for its last logits alone."""
    session = cutaway.Session(model.transformer, capacity=len(prompt) + 8)
    began = time.perf_counter()
    logits = session.feed([prompt])
    return {"seconds": time.perf_counter() - began, "best": int(logits[0].argmax())}


def embed(texts: list[str], batch: int) -> dict[str, Any]:
    """Vectors of texts."""
    began = time.perf_counter()
    vectors = model.embed(texts)
    return {"seconds": time.perf_counter() - began, "first": vectors[0, :4].tolist()}


facts = {
    "version": cutaway.__version__,
    "torch": torch.__version__,
    "load": loaded,
    "imported": imported,
    "peak": peak(),
}
play({**facts, "kernels": missing() or "yes"}, {"decode": decode, "prefill": prefill, "embed": embed}, out)
