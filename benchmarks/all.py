"""Everything that ``RESULTS.md`` is made of, script by script, row by row; then the page.

python -m benchmarks.all [SCRIPT[:ROW] …] [--list] [--quick] [--rounds N]

How long it will take is printed first, as measured on two quiet cores. What fails is named, and the rest goes on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.contest import HERE

# Script → its rows → seconds of a row at its own number of rounds; a script without rows has one without a name.
ROWS: dict[str, dict[str, int]] = {
    "decode": {"q4_1": 50, "q8_0": 70, "f16": 50, "f32": 150, "gemma": 90, "q4_0": 50},
    "prefill": {"q4_1": 70, "q8_0": 60, "exact": 45, "int8": 45, "f32": 90},
    "batch": {
        "q8_0-8": 60,
        "q8_0-32": 120,
        "int8-8": 60,
        "int8-32": 90,
        "f32-8": 90,
        "f32-32": 150,
        "q4_1-8": 60,
        "q4_1-32": 150,
    },
    "first_token": {"": 300},
    "encode": {"short": 150, "long": 330},
    "memory": {"": 200},
    "deterministic": {"q4_1": 30, "f32": 60},
    "growth": {"decode": 60, "prefill": 60, "batch": 60},
}


def chosen(words: Sequence[str]) -> list[tuple[str, str]]:
    """Scripts with rows, of what was asked for: ``decode`` is all its rows, ``decode:q4_1`` one.

    Raises:
        SystemExit: there is no such row.
    """
    found = []
    for word in words or ROWS:
        script, _, row = word.partition(":")
        if script not in ROWS or (row and row not in ROWS[script]):
            raise SystemExit(f"no such row: {word} (--list)")
        found += [(script, row)] if row else [(script, each) for each in ROWS[script]]
    return found


def main() -> None:
    """Say how long, run, make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="SCRIPT[:ROW]")
    parser.add_argument("--list", action="store_true", help="rows and seconds, and nothing else")
    parser.add_argument("--quick", action="store_true", help="one small round each: to see that they work")
    parser.add_argument("--rounds", type=int)
    words = parser.parse_args()
    rows = chosen(words.rows)
    if words.list:
        for script, row in rows:
            print(f"{script + (':' + row if row else ''):24} {ROWS[script][row]:5} s")
    total = sum(ROWS[script][row] for script, row in rows)
    print(f"{len(rows)} rows, about {total / 60:.0f} minutes on two quiet cores" + " (quick: a fifth)" * words.quick)
    if words.list:
        return
    failed = []
    more = ["--quick"] * words.quick + (["--rounds", str(words.rounds)] if words.rounds else [])
    for script, row in rows:
        began = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.{script}", *([row] if row else []), *more]
        if subprocess.run(command, cwd=HERE.parent).returncode:
            failed.append(f"{script}:{row}")
        print(f"[{script} {row}: {time.perf_counter() - began:.0f} s]", flush=True)
    if not words.quick:
        from benchmarks.results import main as page

        page()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
