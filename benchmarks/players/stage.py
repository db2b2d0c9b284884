"""What every player shares: tasks come in as lines of JSON, answers go out the same way."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))


def outlet() -> Any:
    """Where answers go; whatever else is printed goes to standard error from here on."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def play(facts: Mapping[str, Any], tasks: Mapping[str, Callable[..., dict[str, Any]]], out: Any) -> None:
    """Answer until the input ends."""

    def say(value: Mapping[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    say(facts)
    for line in sys.stdin:
        words = json.loads(line)
        say(tasks[words.pop("do")](**words))


def peak() -> int:
    """The most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def prompts_of(prompt: Sequence[int], rows: int) -> list[list[int]]:
    """So many rows that differ in their last token, or the one."""
    return [[*prompt]] if rows == 1 else [[*prompt[:-1], 1000 + i] for i in range(rows)]


def told(logits: Any, tokens: Sequence[int]) -> dict[str, Any]:
    """The likeliest token after each, and the log-probability of the one that follows. numpy [n, vocab]"""
    import numpy as np

    x = np.asarray(logits)
    logp = []
    for row, token in zip(x, tokens[1:], strict=False):  # one by one: a large vocabulary times a text is gigabytes
        wide = row.astype(np.float64)
        logp.append(float(wide[token] - wide.max() - np.log(np.exp(wide - wide.max()).sum())))
    return {"best": x.argmax(-1).tolist(), "logp": logp}
