"""What pages cost and save: time of a step beside a contiguous cache's, in turns, and memory of forks.

python benchmarks/paged_cache.py [MODEL] [TOKENS] [STEPS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import cutaway
from cutaway.cache import PagedStore
from cutaway.generation.session import Session

ROOT = Path(__file__).parents[1]
FORKS = 8


def resident() -> float:
    """What this process holds, in MiB, as Linux tells it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def in_turns(sessions: dict[str, Session], steps: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds of single steps, each session's between the others'."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for step in range(steps + 3):
        for name, session in sessions.items():
            start = clock()
            session.feed([[5]] * len(session.tokens))
            if step >= 3:  # the first ones find nothing in the processor's caches
                times[name].append(1000 * (clock() - start))
    return times


def forked(session: Session, ids: list[int]) -> tuple[float, float]:
    """MiB that eight forks of a prompt take beside it, each a token further on: as Linux tells it, and counted."""
    session.feed([ids])
    before = resident()
    forks = [session.fork() for _ in range(FORKS)]
    for fork in forks:
        fork.feed([[5]])
    ours = sum(fork._cache.nbytes for fork in forks)
    for store in session._cache._stores:
        if isinstance(store, PagedStore):  # pages that forks share, and the prompt has
            ours = (store.pool.used * store.pool.page_nbytes) - store.nbytes
    return resident() - before, ours / 2**20


def main() -> None:
    """Print both."""
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    n = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 40
    model = cutaway.load(name)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))[:n]
    assert len(ids) == n, "more tokens than these pages have"
    kinds = {"contiguous": False, "paged": True}
    threads = torch.get_num_threads()
    print(f"{name}, {n} tokens read; {steps} steps of each in turns, {threads} threads; ms: median (quartiles)")
    for rows in (1, FORKS):
        sessions = {kind: Session(model.transformer, 1, n + steps + 9, paged=paged) for kind, paged in kinds.items()}
        for session in sessions.values():
            session.feed([ids])
            session.select([0] * rows)
        for clock in (time.perf_counter, time.process_time):
            times = in_turns(sessions, steps, clock)
            what = "waited" if clock is time.perf_counter else "worked"
            for kind, found in times.items():
                low, middle, high = statistics.quantiles(found, n=4)
                print(f"  {rows} rows, {kind:<11} {what} {middle:7.1f} ({low:.1f} to {high:.1f})")
            one, two = (statistics.median(times[kind]) for kind in kinds)
            print(f"  {rows} rows, paged {what} {two / one:.3f} of the time")
    for kind, paged in kinds.items():
        held, ours = forked(Session(model.transformer, 1, n + 9, paged=paged), ids)
        print(f"  {kind:<11} {FORKS} forks of the prompt, each a token further on: {held:.0f} MiB; counted {ours:.1f}")


if __name__ == "__main__":
    main()
