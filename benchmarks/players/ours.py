"""cutaway."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from stage import THREADS, outlet, peak, play, prompts_of, told

out = outlet()
import torch  # noqa: E402

torch.set_num_threads(THREADS)
import cutaway  # noqa: E402
import cutaway.store  # noqa: E402  (what a load imports, before memory is looked at)
from cutaway.kernels import Stored, missing  # noqa: E402

imported = peak()
words = json.loads(sys.argv[1])
began = time.perf_counter()
model = cutaway.load(words["path"], dtype=words.get("dtype"), quantize=words.get("quantize"))
loaded = time.perf_counter() - began
options: dict[str, Any] = {"deterministic": True} if words.get("deterministic") else {}
weights = sum(p.raw.numel() if isinstance(p, Stored) else p.nbytes for p in model.transformer.parameters())


def encode(text: str) -> dict[str, Any]:
    """A text's ids."""
    assert model.tokenizer is not None
    return {"ids": model.tokenizer.encode(text)}


def tops(tokens: list[int]) -> dict[str, Any]:
    """What it expects after each token."""
    return told(model.logits(tokens)[0].numpy(), tokens)  # type: ignore[union-attr]


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
        prompts = prompts_of(prompt, rows)
        tokens = [one.tokens for one in model.generate(prompts, max_tokens=n, min_tokens=n, temperature=0, **options)]
    ended = time.perf_counter()
    return {"seconds": ended - began, "first": (first or ended) - began, "tokens": tokens, "peak": peak()}


def prefill(prompt: list[int]) -> dict[str, Any]:
    """Read a prompt for its last logits alone."""
    session = cutaway.Session(model.transformer, capacity=len(prompt) + 8)
    began = time.perf_counter()
    logits = session.feed([prompt])
    return {"seconds": time.perf_counter() - began, "best": int(logits[0].argmax())}


def steps(context: int, n: int, rows: int = 1) -> dict[str, Any]:
    """n single steps after so much context: milliseconds of each."""
    session, times = cutaway.Session(model.transformer, capacity=context + n + 8), []
    session.feed([[500 + i % 900 for i in range(context)]])
    session.select([0] * rows)
    for i in range(n):
        began = time.perf_counter()
        session.feed([[500 + i]] * rows)
        times.append(1000 * (time.perf_counter() - began))
    return {"ms": times}


def embed(texts: list[str], batch: int) -> dict[str, Any]:
    """Vectors of texts, packed as the library packs them."""
    began = time.perf_counter()
    vectors = model.embed(texts)
    return {"seconds": time.perf_counter() - began, "vectors": vectors[:64].tolist()}


facts = {
    "version": f"cutaway {cutaway.__version__}, torch {torch.__version__}",
    "load": loaded,
    "imported": imported,
    "peak": peak(),
    "weights": weights,
    "kernels": missing() or "yes",
}
tasks = {"encode": encode, "tops": tops, "decode": decode, "prefill": prefill, "steps": steps, "embed": embed}
play(facts, tasks, out)
