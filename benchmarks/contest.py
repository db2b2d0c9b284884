"""Contestants in turns: each a process of its own that loads once and then does what it is told, one at a time.

These machines are shared and noisy, so nothing is compared with a time from another run: A B A B …, a warm-up, the
median of several rounds with its spread, and ratios pair by pair. Results go to ``benchmarks/results/*.json``, from
which ``python -m benchmarks.results`` makes ``RESULTS.md``.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
THREADS = 2


@dataclass
class Contestant:
    """A process that answers one line of JSON with another.

    Attributes:
        name: in the table.
        kind: the module of ``benchmarks/players`` that it runs.
        arguments: for its ``prepare``.
        python: the interpreter it needs.
    """

    name: str
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable

    def start(self) -> None:
        """Load; what it says of itself is kept in ``facts``."""
        script = HERE / "players" / f"{self.kind}.py"
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": str(HERE.parent / "src")}
        self._process = subprocess.Popen(
            [self.python, str(script), json.dumps(dict(self.arguments))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.facts = self._answer()

    def do(self, what: str, **words: Any) -> dict[str, Any]:
        """One task: what it did and how long it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **words}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def in_turns(
    contestants: Sequence[Contestant], what: str, rounds: int = 7, **words: Any
) -> dict[str, list[dict[str, Any]]]:
    """Each does the same in each round, one after the other; the first round only warms up."""
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contestants}
    for turn in range(rounds + 1):
        # Whoever comes first in a round differs, so that nobody always follows the same neighbour.
        order = contestants[turn % len(contestants) :] + contestants[: turn % len(contestants)]
        for one in order:
            answer = one.do(what, **words)
            if turn:
                found[one.name].append(answer)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of each round's pair; both are rates, so more than one is faster."""
    return spread([a / b for a, b in zip(mine, theirs, strict=True)])


def keep(name: str, value: Mapping[str, Any]) -> None:
    """Write a result with what it was measured on."""
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"machine": facts, **value}, indent=1, sort_keys=True) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
