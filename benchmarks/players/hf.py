"""transformers, fp32."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from stage import THREADS, outlet, peak, play, prompts_of, told

out = outlet()
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, StoppingCriteria  # noqa: E402

torch.set_num_threads(THREADS)
imported = peak()
words = json.loads(sys.argv[1])
began = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(words["path"], dtype=torch.float32).eval()
loaded = time.perf_counter() - began


class Watch(StoppingCriteria):  # type: ignore[misc]
    """When the first token came."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        self.first = self.first or time.perf_counter()
        return torch.zeros(len(ids), dtype=torch.bool)


@torch.no_grad()
def tops(tokens: list[int]) -> dict[str, Any]:
    """What it expects after each token."""
    return told(model(torch.tensor([tokens])).logits[0].numpy(), tokens)


@torch.no_grad()
def decode(prompt: list[int], n: int, rows: int = 1) -> dict[str, Any]:
    """Read a prompt and write n tokens greedily."""
    ids, watch = torch.tensor(prompts_of(prompt, rows)), Watch()
    began = time.perf_counter()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n,
        min_new_tokens=n,
        do_sample=False,
        stopping_criteria=[watch],
    )
    ended = time.perf_counter()
    tokens = found[:, len(prompt) :].tolist()
    return {"seconds": ended - began, "first": (watch.first or ended) - began, "tokens": tokens, "peak": peak()}


@torch.no_grad()
def prefill(prompt: list[int]) -> dict[str, Any]:
    """Read a prompt for its last logits alone."""
    began = time.perf_counter()
    logits = model(torch.tensor([prompt]), logits_to_keep=1, use_cache=True).logits
    return {"seconds": time.perf_counter() - began, "best": int(logits[0, -1].argmax())}


version = f"transformers {transformers.__version__}, torch {torch.__version__}"
facts = {"version": version, "load": loaded, "imported": imported, "peak": peak()}
play(facts, {"tops": tops, "decode": decode, "prefill": prefill}, out)
