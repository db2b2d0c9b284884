"""Several rows at once, greedily: tokens a second of them all, prompts included, ours and theirs.

python -m benchmarks.batch [ROW …] [--rounds 5] [--tokens 32] [--quick]

A row is a file and how many rows of text: q8_0 beside CTranslate2 in 8 bits and llama.cpp's parallel decoding, f32
beside transformers. ``int8`` is that of q8_0 with our products of whole numbers, which is what the other two use.
"""

from __future__ import annotations

from benchmarks.agreement import agreement, same_rows
from benchmarks.contest import Contestant, in_turns, keep, llama, options, ours, peers, reference, show, start
from benchmarks.decode import PROMPT, rates
from benchmarks.files import file

ROWS = ("q8_0-8", "q8_0-32", "int8-8", "int8-32", "f32-8", "f32-32", "q4_1-8", "q4_1-32")


def stored(kind: str) -> str:
    """The file of a row."""
    return "q8_0" if kind == "int8" else kind


def others(kind: str, rows: int) -> list[Contestant]:
    """Who is measured beside ours."""
    found = [llama(file(stored(kind)), rows=rows, room=512)]
    if kind == "f32":
        found.append(Contestant("transformers", "hf", {"path": str(file("hf"))}, peers()))
    if stored(kind) == "q8_0":
        path = str(file("ct2-int8"))
        found.append(Contestant("CTranslate2 int8", "ct2", {"path": path, "type": "int8"}, peers()))
    return found


def measure(row: str, rounds: int, n: int, quick: bool) -> None:
    """Compare, measure, print, keep."""
    kind, _, count = row.partition("-")
    path, rows = file(stored(kind)), int(count)
    contestants = [ours(path, **({"quantize": kind} if kind == "int8" else {})), *others(kind, rows)]
    print(f"\nbatch {row}: {path.name}, {rows} rows of {len(PROMPT)} tokens in, {n} out")
    start(contestants)
    agree = agreement(contestants, reference(path))
    found = in_turns(contestants, "decode", rounds, prompt=PROMPT, n=n, rows=rows)
    for one in contestants:
        one.stop()
    values, same = {name: rates(answers, n, rows) for name, answers in found.items()}, same_rows(found)
    show(values, "tokens/s")
    print(f"greedy tokens: {same}")
    facts = {one.name: one.facts for one in contestants}
    result = {"file": path.name, "unit": "tokens/s", "values": values, "agree": agree, "greedy": same, "facts": facts}
    keep(f"batch-{row}", result, quick)


def main() -> None:
    """Each row that is asked for."""
    parser = options(__doc__, ROWS, rounds=5)
    parser.add_argument("--tokens", type=int, default=32)
    words = parser.parse_args()
    for row in words.rows:
        measure(row, 1 if words.quick else words.rounds, 4 if words.quick else words.tokens, words.quick)


if __name__ == "__main__":
    main()
