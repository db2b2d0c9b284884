"""A prompt of 512 tokens, for its last logits alone: ours and theirs in tokens a second.

python -m benchmarks.prefill [ROW …] [--rounds 7] [--tokens 512] [--quick]

The row ``exact`` has our exact products over the Q8_0 file beside CTranslate2, which rounds activations to 8 bits;
``int8`` has our own products of whole numbers there, and what they cost in log-probability.
"""

from __future__ import annotations

from benchmarks.agreement import agreement
from benchmarks.contest import Contestant, in_turns, keep, llama, options, ours, peers, reference, show, start
from benchmarks.files import file

ROWS = ("q4_1", "q8_0", "exact", "int8", "f32")


def others(row: str) -> list[Contestant]:
    """Who is measured beside ours."""
    if row in ("exact", "int8"):
        return [Contestant("CTranslate2 int8", "ct2", {"path": str(file("ct2-int8")), "type": "int8"}, peers())]
    found = [llama(file(row))]
    if row == "f32":
        found.append(Contestant("transformers", "hf", {"path": str(file("hf"))}, peers()))
    return found


def measure(row: str, rounds: int, n: int, quick: bool) -> None:
    """Compare, measure, print, keep."""
    path = file("q8_0" if row in ("exact", "int8") else row)
    contestants = [
        ours(path, **({"quantize": "int8"} if row == "int8" else {})),
        *others(row),
        Contestant("limit", "limit"),
    ]
    print(f"\nprefill {row}: {path.name}, {n} tokens")
    start(contestants)
    agree = agreement(contestants, reference(path))
    found = in_turns(contestants, "prefill", rounds, prompt=[*range(500, 500 + n)])
    for one in contestants:
        one.stop()
    limit = [answer["operations_per_s"] for answer in found.pop("limit")]
    same = {name: answers[0]["best"] == found["cutaway"][0]["best"] for name, answers in found.items()}
    values = {name: [n / one["seconds"] for one in answers] for name, answers in found.items()}
    show(values, "tokens/s")
    print(f"the same likeliest token at the end: {same}")
    keep(
        f"prefill-{row}",
        {
            "file": path.name,
            "unit": "tokens/s",
            "values": values,
            "agree": agree,
            "last": same,
            "limit": {"operations_per_s": limit},
            "facts": {one.name: one.facts for one in contestants},
        },
        quick,
    )


def main() -> None:
    """Each row that is asked for."""
    parser = options(__doc__, ROWS)
    parser.add_argument("--tokens", type=int, default=512)
    words = parser.parse_args()
    for row in words.rows:
        measure(row, 1 if words.quick else words.rounds, 64 if words.quick else words.tokens, words.quick)


if __name__ == "__main__":
    main()
