"""llama.cpp through its Python binding's low level calls, so that Python's share is as small as ours."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

from stage import THREADS, outlet, peak, play, prompts_of, told

out = outlet()
import llama_cpp as lib  # noqa: E402
import numpy as np  # noqa: E402

imported = peak()
words = json.loads(sys.argv[1])
lib.llama_backend_init()
began = time.perf_counter()
settings = lib.llama_model_default_params()
settings.n_gpu_layers = 0
model = lib.llama_model_load_from_file(words["path"].encode(), settings)
context = lib.llama_context_default_params()
rows_most = words.get("rows", 1)
context.n_ctx = words.get("room", 1024) * rows_most
context.n_batch = context.n_ubatch = 512
context.n_seq_max = rows_most
context.n_threads = context.n_threads_batch = THREADS
if words.get("kv") == "f32":
    context.type_k = context.type_v = 0
here = lib.llama_init_from_model(model, context)
loaded = time.perf_counter() - began
vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
memory = lib.llama_get_memory(here)


def logits_at(place: int) -> Any:
    """Those of one place of the last batch. [vocab]"""
    return np.ctypeslib.as_array(
        ctypes.cast(lib.llama_get_logits_ith(here, place), ctypes.POINTER(ctypes.c_float)), (vocab,)
    )


def step(rows: list[list[int]], at: int, each: bool = False) -> list[int]:
    """Read some tokens of each row, at most a batch; the likeliest next one of each."""
    count = sum(len(row) for row in rows)
    batch = lib.llama_batch_init(count, 0, 1)
    i, ends = 0, []
    for number, row in enumerate(rows):
        for place, token in enumerate(row):
            batch.token[i], batch.pos[i] = token, at + place
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, number
            batch.logits[i] = each or place == len(row) - 1
            i += 1
        ends.append(i - 1)
    batch.n_tokens = count
    if lib.llama_decode(here, batch):
        raise SystemExit("llama_decode failed")
    best = [int(logits_at(end).argmax()) for end in ends]
    lib.llama_batch_free(batch)
    return best


def read(prompt: list[int]) -> list[int]:
    """A prompt in batches; the likeliest next token."""
    best: list[int] = []
    for at in range(0, len(prompt), context.n_batch):
        best = step([prompt[at : at + context.n_batch]], at)
    return best


def tops(tokens: list[int]) -> dict[str, Any]:
    """What it expects after each token."""
    lib.llama_memory_clear(memory, True)
    step([tokens], 0, each=True)
    return told(np.stack([logits_at(i) for i in range(len(tokens))]), tokens)


def decode(prompt: list[int], n: int, rows: int = 1) -> dict[str, Any]:
    """Read a prompt and write n tokens greedily."""
    lib.llama_memory_clear(memory, True)
    began = time.perf_counter()
    best = read(prompt) if rows == 1 else step(prompts_of(prompt, rows), 0)
    tokens = [[token] for token in best]
    first = time.perf_counter()
    for i in range(n - 1):
        for row, token in zip(tokens, step([row[-1:] for row in tokens], len(prompt) + i), strict=True):
            row.append(token)
    ended = time.perf_counter()
    return {"seconds": ended - began, "first": first - began, "tokens": tokens, "peak": peak()}


def prefill(prompt: list[int]) -> dict[str, Any]:
    """Read a prompt for its last logits alone."""
    lib.llama_memory_clear(memory, True)
    began = time.perf_counter()
    (best,) = read(prompt)
    return {"seconds": time.perf_counter() - began, "best": best}


facts = {
    "version": f"llama.cpp, llama-cpp-python {lib.__version__}",
    "load": loaded,
    "imported": imported,
    "peak": peak(),
}
play(facts, {"tops": tops, "decode": decode, "prefill": prefill}, out)
