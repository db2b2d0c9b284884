"""One stream: tokens a second of greedy decoding, ours and llama.cpp's, on the same file.

python -m benchmarks.decode FILE.gguf [--rounds 7] [--rows 1] [--name q4_1]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.contest import Contestant, in_turns, keep, ratios, spread

PROMPT = [*range(500, 516)]


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--name")
    parser.add_argument("--deterministic", action="store_true", help="our deterministic mode beside our usual one")
    words = parser.parse_args()
    path, peer = str(words.file.resolve()), os.environ.get("CUTAWAY_LLAMA_CPP_PYTHON")
    contestants = [Contestant("cutaway", "ours", {"path": path})]
    if words.deterministic:
        contestants.append(Contestant("deterministic", "ours", {"path": path, "deterministic": True}))
    elif peer:
        contestants.append(Contestant("llama.cpp", "llama", {"path": path, "rows": words.rows}, peer))
    for one in contestants:
        one.start()
    found = in_turns(contestants, "decode", words.rounds, prompt=PROMPT, n=words.tokens, rows=words.rows)
    for one in contestants:
        one.stop()
    # The first token comes with the prompt; the rate is of those after it, and with several rows of all.
    steps = words.tokens - 1 if words.rows == 1 else words.tokens * words.rows

    def rate(answer: dict[str, float]) -> float:
        return steps / (answer["seconds"] - (answer["first"] if words.rows == 1 else 0))

    rates = {name: [rate(answer) for answer in answers] for name, answers in found.items()}
    mine = rates["cutaway"]
    for name, values in rates.items():
        s = spread(values)
        line = f"{name:14} {s['median']:7.1f} tokens/s ({s['least']:.1f} to {s['most']:.1f})"
        if name != "cutaway":
            r = ratios(mine, values)
            line += f"   cutaway is {r['median']:.2f} times as fast ({r['least']:.2f} to {r['most']:.2f})"
            same = sum(a == b for a, b in zip(found["cutaway"][0]["tokens"], found[name][0]["tokens"], strict=True))
            line += f", {same} of {words.rows} rows the same tokens"
        print(line)
    keep(
        f"decode-{words.name or words.file.stem}" + (f"-{words.rows}" if words.rows > 1 else ""),
        {
            "file": words.file.name,
            "rows": words.rows,
            "rates": rates,
            "facts": {one.name: one.facts for one in contestants},
        },
    )


if __name__ == "__main__":
    main()
