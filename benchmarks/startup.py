"""How long ``cutaway --help`` takes, and its like: the median of fresh processes.

python benchmarks/startup.py [RUNS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import cutaway": ["-c", "import cutaway"],
    "import click": ["-c", "import click"],
    "cutaway --help": ["-m", "cutaway", "--help"],
    "cutaway run --help": ["-m", "cutaway", "run", "--help"],
    "cutaway models": ["-m", "cutaway", "models"],
}


def measure(arguments: list[str]) -> float:
    """Seconds of one process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print a line for each command."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    for name, arguments in COMMANDS.items():
        measure(arguments)  # so that files are in the cache and compiled
        times = [measure(arguments) for _ in range(runs)]
        print(f"{name:<20} median {1000 * statistics.median(times):6.0f} ms   best {1000 * min(times):6.0f} ms")


if __name__ == "__main__":
    main()
