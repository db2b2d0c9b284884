"""Run by an interpreter that has llama-cpp-python: greedy tokens of GGUF files, as JSON.

Takes ``[{"path": …, "prompts": [[…], …], "texts": […], "n": 20}, …]`` on standard input. For each file it prints, on
one line, the tokens that follow each prompt, how far apart the two best logits stood at each step, the logits after
each prompt, and the ids of each text. Everything is fp32 and on one thread.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def follow(model: Any, prompt: list[int], n: int) -> tuple[list[int], list[float], list[float]]:
    """The likeliest tokens one after the other, their leads, and the first step's logits."""
    import numpy as np

    model.reset()
    model.eval(prompt)
    tokens, leads, first = [], [], []
    for step in range(n):
        logits = np.array(model.scores[model.n_tokens - 1], dtype=np.float64)
        if step == 0:
            first = logits.tolist()
        best, second = logits.argsort()[::-1][:2]
        tokens.append(int(best))
        leads.append(float(logits[best] - logits[second]))
        model.eval([int(best)])
    return tokens, leads, first


def main() -> None:
    """Read the jobs, print the results."""
    import llama_cpp

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints wherever it likes
    for job in json.load(sys.stdin):
        model = llama_cpp.Llama(
            job["path"],
            n_ctx=128,
            n_batch=128,
            n_threads=1,
            n_threads_batch=1,
            logits_all=True,
            type_k=0,
            type_v=0,
            verbose=False,
        )
        rows = [follow(model, prompt, job["n"]) for prompt in job["prompts"]]
        ids = [model.tokenize(text.encode(), add_bos=True, special=False) for text in job["texts"]]
        tokens, leads, first = ([*column] for column in zip(*rows, strict=True))
        out.write(json.dumps({"tokens": tokens, "leads": leads, "logits": first, "ids": ids}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
