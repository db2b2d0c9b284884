"""Keeping named quantities of a pass over 256 tokens, on a model of GPT-2 small's size: ours and theirs, in turns.

python -m benchmarks.capture [ROW …] [--rounds 7] [--quick]

Ours beside its own plain pass, TransformerLens' ``run_with_cache`` and nnsight's ``trace``, with the same names, whose
numbers are compared first. All give logits too. Memory is what a process grows by at its largest during a capture.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.contest import Contestant, in_turns, keep, options, peers, show, start

EVERY = [*range(12)]
# Row → which quantities, of which layers.
ROWS: dict[str, tuple[list[str], list[int]]] = {
    "one": (["z"], [6]),
    "stream": (["stream"], EVERY),
    "weights": (["weights"], EVERY),
    "six": (["stream", "z", "weights", "attn out", "neurons", "mlp out"], EVERY),
}
TOKENS = 256
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # what is compared is Python and memory, not shares of cores
BOUND = 2e-3


def make(folder: Path) -> None:
    """Random weights of that size, as a Hugging Face folder; and in it two words, for TransformerLens wants some."""
    import torch
    import transformers

    import tokenizers

    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<u>": 0, "a": 1}, unk_token="<u>"))
    special = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "<u>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder / "words")


def agree(found: dict[str, dict[str, list[float]]]) -> float:
    """The largest difference between ours and theirs."""
    most = 0.0
    for name, theirs in found.items():
        for word, numbers in theirs.items():
            mine = found["cutaway"][word]
            if len(mine) != len(numbers):
                raise SystemExit(f"{name}: {word} has another shape")
            most = max(most, *(abs(a - b) for a, b in zip(mine, numbers, strict=True)))
    return most


def alone(one: Contestant, asked: dict[str, Any]) -> float:
    """Bytes of the first capture of a process of its own: nothing is left over from others, on either side."""
    one.start()
    found = one.do("memory", **asked)
    one.stop()
    return float(found["peak"])


def measure(row: str, path: Path, rounds: int, quick: bool) -> None:
    """Compare, measure, print, keep."""
    kinds, layers = ROWS[row]
    ids = random.Random(0).choices(range(50000), k=32 if quick else TOKENS)
    libraries = {"cutaway": None, "TransformerLens": peers(), "nnsight": peers()}
    contestants = [
        Contestant(name, "capture", {"library": name, "path": str(path)}, at or sys.executable, THREADS)
        for name, at in libraries.items()
    ]
    print(f"\ncapture {row}: {len(kinds) * len(layers)} quantities at {len(ids)} tokens")
    start(contestants)
    asked: dict[str, Any] = {"ids": ids, "kinds": kinds, "layers": layers}
    most = agree({one.name: one.do("check", **asked)["numbers"] for one in contestants})
    print(f"numbers differ by at most {most:.1e}")
    if most > BOUND:
        raise SystemExit("not the same numbers")
    ours = contestants[0]
    plain = Contestant("plain pass", "capture")
    plain.do = lambda what, **given: ours.do("plain", ids=ids)  # type: ignore[method-assign]
    answers = in_turns([ours, plain, *contestants[1:]], "watch", rounds, **asked)
    for one in contestants:
        one.stop()
    peaks = {one.name: [alone(one, asked) / 2**20 for _ in range(1 if quick else 3)] for one in contestants}
    seconds = {name: [1000 * one["seconds"] for one in said] for name, said in answers.items()}
    processor = {name: [1000 * one["processor"] for one in said] for name, said in answers.items()}
    show(seconds, "ms")
    print("of the processor:")
    show(processor, "ms")
    show(peaks, "MiB")
    facts = {one.name: one.facts for one in contestants}
    measured = {"values": seconds, "processor": processor, "peaks": peaks}
    keep(f"capture-{row}", {"unit": "ms", **measured, "agree": {"all": f"within {most:.1e}"}, "facts": facts}, quick)


def main() -> None:
    """Each row that is asked for."""
    words = options(__doc__, [*ROWS], rounds=7).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        for row in words.rows:
            measure(row, Path(folder), 1 if words.quick else words.rounds, words.quick)


if __name__ == "__main__":
    main()
