"""CTranslate2, on its own conversion of the dequantised folder."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from stage import THREADS, outlet, peak, play, prompts_of, told

out = outlet()
import ctranslate2  # noqa: E402
import numpy as np  # noqa: E402

imported = peak()
words = json.loads(sys.argv[1])
began = time.perf_counter()
model = ctranslate2.Generator(
    words["path"], device="cpu", compute_type=words["type"], inter_threads=1, intra_threads=THREADS
)
loaded = time.perf_counter() - began
names = json.loads((Path(words["path"]) / "vocabulary.json").read_text())


def spelled(rows: list[list[int]]) -> list[list[str]]:
    """Its tokens are strings."""
    return [[names[token] for token in row] for row in rows]


def tops(tokens: list[int]) -> dict[str, Any]:
    """What it expects after each token."""
    return told(np.array(model.forward_batch(spelled([tokens])))[0], tokens)


def decode(prompt: list[int], n: int, rows: int = 1) -> dict[str, Any]:
    """Read a prompt and write n tokens greedily."""
    times: list[float] = []

    def came(step: Any) -> bool:
        times.append(time.perf_counter())
        return False

    began = time.perf_counter()
    found = model.generate_batch(
        spelled(prompts_of(prompt, rows)),
        max_length=n,
        min_length=n,
        beam_size=1,
        sampling_topk=1,
        include_prompt_in_result=False,
        callback=came if rows == 1 else None,
    )
    ended = time.perf_counter()
    tokens = [one.sequences_ids[0] for one in found]
    return {"seconds": ended - began, "first": (times or [ended])[0] - began, "tokens": tokens, "peak": peak()}


def prefill(prompt: list[int]) -> dict[str, Any]:
    """Read a prompt for one token: the way to its last logits alone."""
    began = time.perf_counter()
    (found,) = model.generate_batch(
        spelled([prompt]), max_length=1, beam_size=1, sampling_topk=1, include_prompt_in_result=False
    )
    took = time.perf_counter() - began
    return {"seconds": took, "best": (found.sequences_ids[0] or [-1])[0]}


version = f"CTranslate2 {ctranslate2.__version__} ({model.compute_type})"
facts = {"version": version, "load": loaded, "imported": imported, "peak": peak()}
play(facts, {"tops": tops, "decode": decode, "prefill": prefill}, out)
