"""Whether contestants compute the same, before anyone is timed: on a text, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.contest import Contestant

TEXT = """\
A lighthouse keeper on a small island kept a diary for forty years. Most of its pages speak of the weather, of oil and
wicks and glass, and of ships that passed by without stopping. On the last page he wrote: "Today the engineers came to
make the lamp electric. They were polite, and they asked me how many nights I had missed. I told them: none." The
engineers found that the old lamp had been turned by a clockwork which had to be wound every four hours, day and night.

There are three reasons why bread rises. First, yeast eats sugar and gives off carbon dioxide. Second, kneading makes
long threads of gluten, which hold the gas as a balloon holds air. Third, water in the dough turns into steam in the
oven and lifts it once more before the crust is hard. Take away any one of them and you get a biscuit.

def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)
"""
# Log-probabilities of fp32 sums in another order stay far within this; one wrong block of weights does not.
BOUND = 2e-3


def agreement(contestants: Sequence[Contestant], judge: Contestant, most: int = 256) -> dict[str, dict[str, Any]]:
    """How often each finds the likeliest token that the judge finds, and how far log-probabilities of the text differ.

    Args:
        contestants: who are asked. Ours must be within `BOUND` of the judge, unless it was asked to round.
        judge: asked first, then stopped.
        most: tokens.

    Raises:
        SystemExit: ours computes something else.
    """
    judge.start()
    ids = judge.do("encode", text=TEXT)["ids"][:most]
    known = judge.do("tops", tokens=ids)
    judge.stop()
    found: dict[str, dict[str, Any]] = {}
    for one in contestants:
        if one.kind == "limit":
            continue
        said = one.do("tops", tokens=ids)
        same = sum(a == b for a, b in zip(said["best"], known["best"], strict=True))
        moves = [abs(a - b) for a, b in zip(said["logp"], known["logp"], strict=True)]
        differs, mean = max(moves), sum(moves) / len(moves)
        found[one.name] = {"same": same, "of": len(ids), "logp": differs, "mean": mean}
        agree = f"{same} of {len(ids)} likeliest tokens"
        print(f"{one.name:22} {agree}; log-probabilities within {differs:.1e}, on average {mean:.1e}")
        if one.kind == "ours" and not one.arguments.get("quantize") and not differs <= BOUND:
            raise SystemExit(f"{one.name} does not compute what its weights say")
    return found


def same_rows(answers: Mapping[str, Sequence[Mapping[str, Any]]], mine: str = "cutaway") -> dict[str, str]:
    """How many rows of greedy tokens were ours, for each of the others, and how many tokens until they part."""
    found = {}
    for name, theirs in answers.items():
        if name == mine or "tokens" not in theirs[0]:
            continue
        pairs = list(zip(answers[mine][0]["tokens"], theirs[0]["tokens"], strict=True))
        rows = sum(a == b for a, b in pairs)
        before = [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a)) for a, b in pairs]
        found[name] = f"{rows} of {len(pairs)} rows alike, the first {min(before)} tokens in all"
    return found
