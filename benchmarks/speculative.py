"""What guessing ahead is worth: acceptance, tokens a pass, and time with a draft over time without, in turns.

python benchmarks/speculative.py [MODEL] [ROUNDS]

The drafts are the text itself and the model's own layers with some left out: a model that nobody trained for it.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cutaway
from cutaway.generation.generate import Generation
from cutaway.model import Model
from cutaway.models import Transformer

LETTER = """Dear Ms Abernathy,

thank you for your order of the 14th of March. We are sorry to say that the blue kettle (article 20-1187) is out of
stock until the end of April. The two enamel mugs and the tea strainer will leave our warehuose in Rotterdam tomorrow
and should raech you within five working days. If you would rather not wait for the kettle, please let us know before
the 28th, and we will return the price of it, EUR 42.50, to the card that you paid with.

Yours sincerely,
Tobias Verhoeven"""
CODE = """def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)


def variance(values):
    middle = mean(values)
    total = 0
    for value in values:
        total = total + (value - middle) ** 2
    return total / len(values)
"""
TASKS = {
    "correct a letter": f"Correct the spelling mistakes in this letter, and change nothing else:\n\n{LETTER}",
    "comment a program": f"{CODE}\nWrite this file again with docstrings.",
    "write freely": "Tell me about the history of bread.",
}
WAYS = ({"temperature": 0.0}, {"temperature": 0.7, "seed": 3, "top_k": 0, "top_p": 1.0})


def without(model: Model, layers: Sequence[int]) -> Model:
    """The model with those layers left out; its weights are shared."""
    spec, network = model.spec, model.transformer
    kept = [i for i in range(len(spec.decoder.layers)) if i not in layers]
    fewer = replace(spec.decoder, layers=tuple(spec.decoder.layers[i] for i in kept))
    names = {f"decoder.layers.{old}.": f"decoder.layers.{new}." for new, old in enumerate(kept)}
    weights = {}
    for name, value in network.state_dict().items():
        found = re.match(r"decoder\.layers\.\d+\.", name)
        if found is None or found[0] in names:
            weights[name if found is None else names[found[0]] + name[found.end() :]] = value
    made = Transformer(replace(spec, decoder=fewer))
    made.load_state_dict(weights, assign=True)
    return Model(made.eval(), model.tokenizer, model.settings)


def timed(model: Model, ids: list[int], **arguments: Any) -> tuple[float, float, Generation]:
    """Milliseconds of the clock and of processors for a token after the first, and the answer."""
    stream = model.stream(ids, **arguments)
    next(stream)
    start, used, had = time.perf_counter(), time.process_time(), len(stream.result.tokens)
    for _ in stream:
        pass
    count = max(1, len(stream.result.tokens) - had) / 1000
    return (time.perf_counter() - start) / count, (time.process_time() - used) / count, stream.result


def report(
    name: str, times: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]], answer: Generation
) -> str:
    """One line. Speeds are medians over the rounds, each against the round's own run without a draft."""
    clock = [one for one, _ in times]
    line = f"  {name:<20} {statistics.median(clock):7.1f} ({min(clock):.1f} … {max(clock):.1f})"
    if (spent := answer.speculation) is None:
        return line
    by_clock, by_work = ([a[i] / b[i] for a, b in zip(plain, times, strict=True)] for i in (0, 1))
    return (
        f"{line}  {spent.accepted:3} of {spent.proposed:3} accepted ({spent.acceptance or 0:4.0%})"
        f"  {len(answer.tokens) / spent.passes:5.2f} tokens a pass  speed × {statistics.median(by_clock):.2f}"
        f" ({min(by_clock):.2f} … {max(by_clock):.2f}), by processor time × {statistics.median(by_work):.2f}"
    )


def main() -> None:
    """Print a line for each task, temperature and draft."""
    model = cutaway.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    n = len(model.spec.decoder.layers)
    drafts: dict[str, Any] = {
        "prompt": "prompt",
        f"first {n - n // 6} layers": without(model, range(n - n // 6, n)),
        "2 layers left out": without(model, range(n // 2 + 1, n // 2 + 3)),
    }
    print(f"{model!r}; {rounds} rounds in turns; milliseconds a token: median (least … most)")
    for task, prompt in TASKS.items():
        ids = model.encode_prompt([{"role": "user", "content": prompt}])
        for way in WAYS:
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("none", *drafts)}
            answers: dict[str, Generation] = {}
            for _ in range(rounds):
                for name, found in times.items():
                    ahead = {} if name == "none" else {"draft": drafts[name]}
                    *took, answers[name] = timed(model, ids, max_tokens=96, **way, **ahead)
                    found.append((took[0], took[1]))
            written = len(answers["none"].tokens)
            print(f"\n{task}, {len(ids)} tokens, temperature {way['temperature']:g}: {written} more")
            for name, found in times.items():
                tie = "" if answers[name].tokens == answers["none"].tokens else "  (another answer: a near-tie)"
                print(report(name, found, times["none"], answers[name]) + tie, flush=True)


if __name__ == "__main__":
    main()
