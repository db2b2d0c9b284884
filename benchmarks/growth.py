"""How cost grows, beside what it must be at least: with the context, with a prompt's length, with a batch's size.

python -m benchmarks.growth [ROW …] [--rounds 5] [--quick]

Writes a chart of each row beside its numbers. The floor is reckoned from the spec and the machine's own speeds, which
take turns with the points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cutaway
from benchmarks import predict
from benchmarks.agreement import agreement
from benchmarks.chart import Point, chart
from benchmarks.contest import HERE, Contestant, keep, options, ours, reference, spread, start
from benchmarks.files import file, folder

FILES = ("q4_1", "f32")
ROWS = ("decode", "prefill", "batch")
SIZES = {
    "decode": [16, 64, 256, 1024, 2048, 4096],
    "prefill": [16, 64, 128, 256, 512, 1024, 2048],
    "batch": [1, 2, 4, 8, 16, 32],
}
SAYS = {
    "decode": ("A token after more and more context", "tokens of context", "ms a token"),
    "prefill": ("A prompt, longer and longer", "tokens", "ms"),
    "batch": ("A step of more and more rows, 64 tokens of context", "rows", "ms a step"),
}
CONTEXT = 64  # tokens that each row of a batch has read


def point(one: Contestant, row: str, size: int) -> float:
    """Milliseconds: of the steps after some that warm up the middle one."""
    if row == "prefill":
        return 1000 * float(one.do("prefill", prompt=[500 + i % 900 for i in range(size)])["seconds"])
    words = {"context": size, "n": 10} if row == "decode" else {"context": CONTEXT, "n": 10, "rows": size}
    times = sorted(one.do("steps", **words)["ms"][2:])
    return float(times[len(times) // 2])


def floor(row: str, model: cutaway.Model, machine: predict.Machine) -> Callable[[int], float]:
    """Milliseconds of each size, at least."""
    return {
        "decode": lambda n: 1000 * predict.step(model, machine, n),
        "prefill": lambda n: 1000 * predict.prompt(model, machine, n),
        "batch": lambda n: 1000 * predict.step(model, machine, CONTEXT, n),
    }[row]


def measure(row: str, rounds: int, sizes: Sequence[int], quick: bool) -> None:
    """Compare, measure, print, keep, draw."""
    names = FILES[:1] if quick else FILES
    limit = Contestant("limit", "limit")
    contestants = [ours(file(name), name) for name in names]
    start([*contestants, limit])
    agree: dict[str, dict[str, object]] = {}
    for name, one in zip(names, contestants, strict=True):
        agree |= agreement([one], reference(file(name)), 64)
    values: dict[str, dict[int, list[float]]] = {name: {n: [] for n in sizes} for name in names}
    limits = []
    for turn in range(rounds + 1):
        said = limit.do("limits")
        limits += [said] * bool(turn)
        for n in sizes:
            for one in contestants:
                ms = point(one, row, n)
                values[one.name][n] += [ms] * bool(turn)
        print(".", end="", flush=True)
    for one in (*contestants, limit):
        one.stop()
    speeds = [spread([one[word] for one in limits])["median"] for word in ("bytes_per_s", "operations_per_s")]
    machine = predict.Machine(*speeds)
    measured: dict[str, list[Point]] = {}
    predicted: dict[str, list[Point]] = {}
    print(f"\n{row}: reads {speeds[0] / 1e9:.1f} GB/s, {speeds[1] / 1e9:.0f} GFLOP/s; ms, and times the floor")
    for name in names:
        least = floor(row, cutaway.load(file(name)), machine)
        measured[name] = [(n, *spread(found).values()) for n, found in values[name].items()]
        predicted[name] = [(n, least(n), least(n), least(n)) for n in sizes]
        for (n, median, low, high), (_, must, _, _) in zip(measured[name], predicted[name], strict=True):
            print(f"  {name:6} {n:6} {median:9.2f} ({low:.2f} to {high:.2f})   {median / must:.2f} × {must:.2f}")
    title, x_says, y_says = SAYS[row]
    keep(
        f"growth-{row}",
        {
            "unit": "ms",
            "points": measured,
            "floor": predicted,
            "rounds": rounds,
            "agree": agree,
            "limit": limits,
            "facts": {one.name: one.facts for one in contestants},
        },
        quick,
    )
    place = folder() / "quick" if quick else HERE / "results"
    (place / f"growth-{row}.svg").write_text(chart(f"{title} (SmolLM2-135M)", x_says, y_says, measured, predicted))


def main() -> None:
    """Each row that is asked for."""
    words = options(__doc__, ROWS, rounds=5).parse_args()
    for row in words.rows:
        sizes = SIZES[row][:3] if words.quick else SIZES[row]
        measure(row, 1 if words.quick else words.rounds, sizes, words.quick)


if __name__ == "__main__":
    main()
