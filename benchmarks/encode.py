"""MiniLM: texts a second, of about 16 tokens and of 256, in batches of 32: ours and theirs.

python -m benchmarks.encode [ROW …] [--rounds 5] [--quick]

Ours packs texts by length as it sees fit; the others have batches of 32 of like lengths.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.contest import Contestant, in_turns, keep, options, ours, peers, show, start
from benchmarks.files import file

ROWS = {"short": (1000, 14), "long": (200, 254)}  # texts, and tokens of each beside [CLS] and [SEP]
# Each is one token.
WORDS = [
    "the",
    "a",
    "this",
    "old",
    "new",
    "red",
    "small",
    "large",
    "man",
    "woman",
    "child",
    "dog",
    "cat",
    "horse",
    "house",
    "river",
    "city",
    "road",
    "tree",
    "boat",
    "sees",
    "finds",
    "takes",
    "gives",
    "reads",
    "writes",
    "wants",
    "leaves",
    "makes",
    "builds",
    "near",
    "under",
    "over",
    "behind",
    "before",
    "after",
    "slowly",
    "quickly",
    "never",
    "often",
    "bread",
    "water",
    "light",
    "stone",
    "paper",
    "music",
    "winter",
    "summer",
    "morning",
    "evening",
    "and",
    "but",
    "or",
    "if",
]
BOUND = 1e-4


def texts_of(count: int, tokens: int) -> list[str]:
    """Sentences of words that are a token each; those of 16 differ in length by up to 6."""
    source = random.Random(0)
    spread = 6 if tokens < 100 else 0
    return [
        " ".join(source.choices(WORDS, k=tokens + source.randint(-spread, spread) if spread else tokens))
        for _ in range(count)
    ]


def furthest(one: Sequence[Sequence[float]], two: Sequence[Sequence[float]]) -> float:
    """The largest difference of two numbers."""
    return max(abs(a - b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


def measure(row: str, rounds: int, quick: bool) -> None:
    """Compare, measure, print, keep."""
    count, tokens = ROWS[row]
    texts = texts_of(count // 20 if quick else count, tokens)
    path = file("minilm")
    given = {"path": str(path), "onnx": str(file("onnx"))}
    contestants = [
        ours(path),
        Contestant("sentence-transformers", "sentences", {**given, "how": "sentence-transformers"}, peers()),
        Contestant("ONNX Runtime", "sentences", {**given, "how": "onnx"}, peers()),
    ]
    print(f"\nencode {row}: {len(texts)} texts of about {tokens + 2} tokens")
    start(contestants)
    found = {one.name: one.do("embed", texts=texts[:64], batch=32)["vectors"] for one in contestants}
    judge = found["sentence-transformers"]
    differs = {name: furthest(vectors, judge) for name, vectors in found.items()}
    print("vectors differ from sentence-transformers' by at most", {k: f"{v:.1e}" for k, v in differs.items()})
    if max(differs.values()) > BOUND:
        raise SystemExit("not the same vectors")
    answers = in_turns(contestants, "embed", rounds, texts=texts, batch=32)
    for one in contestants:
        one.stop()
    values = {name: [len(texts) / one["seconds"] for one in said] for name, said in answers.items()}
    show(values, "texts/s")
    result = {
        "file": path.name,
        "unit": "texts/s",
        "values": values,
        "agree": {name: f"vectors within {x:.1e} of sentence-transformers'" for name, x in differs.items()},
        "facts": {one.name: one.facts for one in contestants},
    }
    keep(f"encode-{row}", result, quick)


def main() -> None:
    """Each row that is asked for."""
    words = options(__doc__, [*ROWS], rounds=5).parse_args()
    for row in words.rows:
        measure(row, 1 if words.quick else words.rounds, words.quick)


if __name__ == "__main__":
    main()
