"""Memory of one stream of 2,048 tokens: the peak, without what imports took and without the weights.

python -m benchmarks.memory [--rounds 5] [--tokens 2048] [--quick]

Each round is a process of its own, since a peak never falls. Both keep keys and values in fp32. The weights are the
file's bytes, on both sides: a second copy of them counts.
"""

from __future__ import annotations

from typing import Any

from benchmarks.contest import Contestant, keep, llama, options, ours, show, turns
from benchmarks.files import file

OUT = 32  # tokens that are written after the prompt


def alone(one: Contestant, n: int) -> dict[str, Any]:
    """A process that loads, reads, writes, and ends."""
    one.start()
    answer = one.do("decode", prompt=[500 + i % 900 for i in range(n - OUT)], n=OUT)
    one.stop()
    return {**answer, "imported": one.facts["imported"], "loaded": one.facts["peak"]}


def main() -> None:
    """Compare, measure, print, keep."""
    parser = options(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=2048)
    words = parser.parse_args()
    n = 256 if words.quick else words.tokens
    path = file("q4_1")
    weights = path.stat().st_size
    contestants = [ours(path), llama(path, kv="f32", room=n + 32)]
    found = turns(contestants, lambda one: alone(one, n), 1 if words.quick else words.rounds)
    tokens = {name: answers[0]["tokens"][0] for name, answers in found.items()}
    same = sum(a == b for a, b in zip(tokens["cutaway"], tokens["llama.cpp"], strict=True))
    print(f"{path.name}, {n} tokens; {same} of {OUT} greedy tokens alike; weights {weights / 2**20:.1f} MiB")
    values = {
        name: [(one["peak"] - one["imported"] - weights) / 2**20 for one in answers] for name, answers in found.items()
    }
    show(values, "MiB")
    loads = {name: [(one["loaded"] - one["imported"] - weights) / 2**20 for one in a] for name, a in found.items()}
    print("of which before the first token:")
    show(loads, "MiB")
    keep(
        "memory",
        {
            "file": path.name,
            "unit": "MiB",
            "values": values,
            "loaded": loads,
            "agree": {"llama.cpp": f"{same} of {OUT} greedy tokens as cutaway's"},
            "facts": {one.name: one.facts for one in contestants},
        },
        words.quick,
    )


if __name__ == "__main__":
    main()
