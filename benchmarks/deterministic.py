"""The deterministic mode beside the usual one: tokens a second of one stream.

python -m benchmarks.deterministic [ROW …] [--rounds 7] [--quick]
"""

from __future__ import annotations

from benchmarks.agreement import same_rows
from benchmarks.contest import in_turns, keep, options, ours, show, start
from benchmarks.decode import PROMPT, rates
from benchmarks.files import file

ROWS = ("q4_1", "f32")


def measure(row: str, rounds: int, n: int, quick: bool) -> None:
    """Compare, measure, print, keep."""
    path = file(row)
    contestants = [ours(path), ours(path, "deterministic", deterministic=True)]
    print(f"\ndeterministic {row}: {path.name}")
    start(contestants)
    found = in_turns(contestants, "decode", rounds, prompt=PROMPT, n=n)
    for one in contestants:
        one.stop()
    same = same_rows(found)
    print(f"greedy tokens: {same}")
    values = {name: rates(answers, n) for name, answers in found.items()}
    show(values, "tokens/s", "deterministic")
    facts = {one.name: one.facts for one in contestants}
    result = {"file": path.name, "unit": "tokens/s", "values": values, "agree": same, "facts": facts}
    keep(f"deterministic-{row}", result, quick)


def main() -> None:
    """Each row that is asked for."""
    words = options(__doc__, ROWS).parse_args()
    for row in words.rows:
        measure(row, 1 if words.quick else words.rounds, 8 if words.quick else 64, words.quick)


if __name__ == "__main__":
    main()
