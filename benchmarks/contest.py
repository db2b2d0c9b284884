"""Contestants in turns: each a process of its own that loads once and then does what it is told, one at a time.

These machines are shared and noisy, so nothing is compared with a time from another run: A B A B …, a warm-up, the
median of several rounds with its spread, and ratios pair by pair. Outputs are compared before anything is timed.
Results go to ``benchmarks/results/*.json``, from which ``python -m benchmarks.results`` makes ``RESULTS.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
THREADS = 2
LEAST_ROUNDS = 5  # fewer show that a script works; they are no result


def peers() -> str:
    """The interpreter that the others live in: ``make oracles`` makes one, CUTAWAY_PEERS_PYTHON names another."""
    named = os.environ.get("CUTAWAY_PEERS_PYTHON") or os.environ.get("CUTAWAY_LLAMA_CPP_PYTHON")
    return named or str(HERE.parent / ".oracles" / "bin" / "python")


def environment(**more: str) -> dict[str, str]:
    """That of a contestant: so many threads, this checkout, no network."""
    threads = {word: str(THREADS) for word in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(HERE.parent / "src")}
    return {**os.environ, **threads, **quiet, **more}


@dataclass
class Contestant:
    """A process that answers one line of JSON with another.

    Attributes:
        name: in the table.
        kind: the module of ``benchmarks/players`` that it runs.
        arguments: for its ``prepare``.
        python: the interpreter it needs.
        words: of its environment, beside the usual.
    """

    name: str
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    words: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Load; what it says of itself is kept in ``facts``."""
        script = HERE / "players" / f"{self.kind}.py"
        self._process = subprocess.Popen(
            [self.python, str(script), json.dumps(dict(self.arguments))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("CUTAWAY_BENCH_LOUD") else subprocess.DEVNULL,
            env=environment(**self.words),
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
            raise SystemExit(f"{self.name} ended: {self._process.wait()} (CUTAWAY_BENCH_LOUD=1 shows why)")
        found: dict[str, Any] = json.loads(line)
        return found

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def ours(path: Path, name: str = "cutaway", **arguments: Any) -> Contestant:
    """This library, as it is."""
    return Contestant(name, "ours", {"path": str(path), **arguments})


def reference(path: Path) -> Contestant:
    """Plain PyTorch in fp32 over the dequantised weights: what everything is compared with."""
    words = {"CUTAWAY_KERNELS": "0"}
    return Contestant("reference", "ours", {"path": str(path), "dtype": "float32"}, words=words)


def llama(path: Path, **arguments: Any) -> Contestant:
    """llama.cpp on the same file."""
    return Contestant("llama.cpp", "llama", {"path": str(path), **arguments}, peers())


def start(contestants: Sequence[Contestant]) -> None:
    """Load them all; end where ours runs without its kernels, which would not be what is claimed."""
    for one in contestants:
        one.start()
        if one.kind == "ours" and not one.words and one.facts["kernels"] != "yes":
            raise SystemExit(f"{one.name} runs without native kernels: {one.facts['kernels']}")


def in_turns(
    contestants: Sequence[Contestant], what: str, rounds: int = 7, **words: Any
) -> dict[str, list[dict[str, Any]]]:
    """Each does the same in each round, one after the other; the first round only warms up."""
    return turns(contestants, lambda one: one.do(what, **words), rounds)


def turns(
    contestants: Sequence[Contestant], do: Callable[[Contestant], dict[str, Any]], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """As `in_turns`, whatever it is that they do."""
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contestants}
    for turn in range(rounds + 1):
        # Whoever comes first in a round differs, so that nobody always follows the same neighbour.
        at = turn % len(contestants)
        for one in [*contestants[at:], *contestants[:at]]:
            answer = do(one)
            if turn:
                found[one.name].append(answer)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Of each round's pair; of rates, more than one is faster."""
    return spread([a / b for a, b in zip(mine, theirs, strict=True)])


def show(values: Mapping[str, Sequence[float]], unit: str, mine: str = "cutaway") -> None:
    """A line for each contestant, with what ours is to it."""
    for name, found in values.items():
        s = spread(found)
        line = f"{name:22} {s['median']:9.2f} {unit} ({s['least']:.2f} to {s['most']:.2f})"
        if name != mine and mine in values:
            r = ratios(values[mine], found)
            line += f"   {mine} to it {r['median']:.2f} ({r['least']:.2f} to {r['most']:.2f})"
        print(line, flush=True)


def options(doc: str | None, rows: Sequence[str] = (), rounds: int = 7) -> argparse.ArgumentParser:
    """What every script takes: rows, rounds, and ``--quick`` to see that it works."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rows:
        parser.add_argument("rows", nargs="*", default=[*rows], help="of " + ", ".join(rows), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true", help="one small round, kept beside the models: no result")
    return parser


def keep(name: str, value: Mapping[str, Any], quick: bool = False) -> None:
    """Write a result with what it was measured on. One of a quick run goes where nobody takes it for a result."""
    from benchmarks.files import folder

    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": THREADS,
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    place = folder() / "quick" if quick else HERE / "results"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.json").write_text(json.dumps({"machine": facts, **value}, indent=1, sort_keys=True) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
