"""One stream: tokens a second of greedy decoding, ours and theirs on the same weights, beside the memory's limit.

python -m benchmarks.decode [ROW …] [--rounds 7] [--tokens 64] [--quick]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.agreement import agreement, same_rows
from benchmarks.contest import Contestant, in_turns, keep, llama, options, ours, peers, reference, show, start
from benchmarks.files import file

PROMPT = [*range(500, 516)]
ROWS = ("q4_1", "q8_0", "f16", "f32", "gemma", "q4_0")


def others(row: str) -> list[Contestant]:
    """Who is measured beside ours."""
    found = [llama(file(row))]
    if row == "f32":
        found.append(Contestant("transformers", "hf", {"path": str(file("hf"))}, peers()))
        path = str(file("ct2-float32"))
        found.append(Contestant("CTranslate2", "ct2", {"path": path, "type": "float32"}, peers()))
    if row == "q8_0":
        path = str(file("ct2-int8"))
        found.append(Contestant("CTranslate2 int8", "ct2", {"path": path, "type": "int8"}, peers()))
    return found


def rates(answers: Sequence[Mapping[str, Any]], n: int, rows: int = 1) -> list[float]:
    """Tokens a second. The first token comes with the prompt; the rate is of those after it, and of all in a batch."""
    if rows > 1:
        return [rows * n / one["seconds"] for one in answers]
    return [(n - 1) / (one["seconds"] - one["first"]) for one in answers]


def measure(row: str, rounds: int, n: int, quick: bool) -> None:
    """Compare, measure, print, keep."""
    path = file(row)
    contestants = [ours(path), *others(row), Contestant("limit", "limit")]
    print(f"\ndecode {row}: {path.name}, {len(PROMPT)} tokens in, {n} out")
    start(contestants)
    agree = agreement(contestants, reference(path))
    found = in_turns(contestants, "decode", rounds, prompt=PROMPT, n=n)
    for one in contestants:
        one.stop()
    limit = [answer["bytes_per_s"] for answer in found.pop("limit")]
    values = {name: rates(answers, n) for name, answers in found.items()}
    same = same_rows(found)
    weights = contestants[0].facts["weights"]
    shares = [weights * rate / most for rate, most in zip(values["cutaway"], limit, strict=True)]
    show(values, "tokens/s")
    print(f"{weights / 1e6:.1f} MB of weights a token")
    show({"memory reads": [x / 1e9 for x in limit]}, "GB/s")
    show({"share of that, cutaway": [100 * share for share in shares]}, "%")
    print(f"greedy tokens: {same}")
    keep(
        f"decode-{row}",
        {
            "file": path.name,
            "unit": "tokens/s",
            "values": values,
            "agree": agree,
            "greedy": same,
            "limit": {"bytes_per_s": limit, "weights": weights, "shares": shares},
            "facts": {one.name: one.facts for one in contestants},
        },
        quick,
    )


def main() -> None:
    """Each row that is asked for."""
    parser = options(__doc__, ROWS)
    parser.add_argument("--tokens", type=int, default=64)
    words = parser.parse_args()
    for row in words.rows:
        measure(row, 1 if words.quick else words.rounds, 8 if words.quick else words.tokens, words.quick)


if __name__ == "__main__":
    main()
