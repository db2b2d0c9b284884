"""A cold process to its first token, from its start: imports, load, prompt. Files are in the system's cache.

python -m benchmarks.first_token [CONTESTANT …] [--rounds 5] [--quick]

`import torch` is one of the contestants, since ours cannot be quicker than that. transformers reads the GGUF, which
takes it half a minute a round.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.contest import HERE, Contestant, environment, keep, options, peers, show, turns
from benchmarks.files import file

PROMPT = "The Eiffel Tower is in"
KINDS = {"cutaway": "ours", "import torch": "torch", "llama.cpp": "llama", "transformers": "hf"}


def cold(one: Contestant, path: Path) -> dict[str, Any]:
    """Seconds of one process until its answer is there."""
    python = sys.executable if one.kind in ("ours", "torch") else peers()
    command = [python, str(HERE / "players" / "cold.py"), one.kind, str(path), PROMPT]
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        took = time.perf_counter() - began
    if not said:
        raise SystemExit(f"{one.name} said nothing: {' '.join(command)}")
    return {"seconds": took, "said": said}


def main() -> None:
    """Compare, measure, print, keep."""
    words = options(__doc__, [*KINDS], rounds=5).parse_args()
    path = file("q4_1")
    contestants = [Contestant(name, KINDS[name]) for name in words.rows]
    found = turns(contestants, lambda one: cold(one, path), 1 if words.quick else words.rounds)
    said = {name: answers[0]["said"] for name, answers in found.items()}
    print(f"first token after {PROMPT!r}: {said}")
    tokens = {token for name, token in said.items() if name != "import torch"}
    if len(tokens) > 1:
        print("not all say the same")
    values = {name: [answer["seconds"] for answer in answers] for name, answers in found.items()}
    show(values, "s")
    result = {
        "file": path.name,
        "unit": "s",
        "values": values,
        "agree": {name: f"token {token}" for name, token in said.items() if name != "import torch"},
    }
    keep("first-token", result, words.quick)


if __name__ == "__main__":
    main()
