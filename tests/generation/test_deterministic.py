"""``deterministic=True``: the same tokens and the same bits, however a request is computed."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.errors import RequestError
from cutaway.generation.generate import Generation
from cutaway.generation.session import Session
from cutaway.model import Model
from cutaway.models.head import Head
from cutaway.modules.linear import Linear
from tests.reference import tiny, tiny_seq2seq

NAMES = ("llama", "gemma3", "bloom", "gpt2", "phi-qk-norm", "mistral-window")
MORE = tuple(name for name in tiny.FAMILIES if name not in NAMES and "mixtral" not in name and "moe" not in name)


def made(name: str, folder: Path) -> Model:
    kind = tiny_seq2seq if name in tiny_seq2seq.CASES else tiny
    return cutaway.load(kind.write(kind.config(name), folder / name))


def bits(one: Generation) -> list[tuple[int, bytes]]:
    assert one.logprobs is not None
    return [(entry.token, struct.pack("<d", entry.logprob)) for entry in one.logprobs]


def trials(model: Model, n: int, seed: int, *, most: int = 9, longest: int = 25, **how: Any) -> tuple[int, int]:
    """Random ragged batches against each of their prompts alone, and against one pass over the whole text.

    Gives how many log-probabilities were not the same bits, and of how many.
    """
    source, differ, total = random.Random(seed), 0, 0
    rows = model.spec.vocab_size
    for _ in range(n):
        count = source.randint(1, most)
        prompts = [[source.randrange(3, rows) for _ in range(source.randint(1, longest))] for _ in range(count)]
        together = model.generate(prompts, max_tokens=8, logprobs=0, seed=5, **how)
        place = source.randrange(count)
        alone = model.generate(prompts[place], max_tokens=8, logprobs=0, seed=5, **how)
        mine, other = bits(together[place]), bits(alone)
        differ += sum(a != b for a, b in zip(mine, other, strict=True))
        total += len(other)
        if model.spec.source is None:
            whole = model.score(prompts[place] + alone.tokens, deterministic=how["deterministic"])
            read = whole.logprobs[len(prompts[place]) :]
            differ += sum(struct.pack("<d", value) != old for value, (_, old) in zip(read, other, strict=True))
            total += len(other)
    return differ, total


@pytest.mark.parametrize("name", [*NAMES, "t5", "bart", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_in_any_company(name: str, tmp_path: Path) -> None:
    """By the native library and by the readable blocks. And the inverse: those, without it, do differ, or this would
    show nothing; the library's sums know no company in any case."""
    model = made(name, tmp_path)
    for native in (True, False):
        model.transformer.use_kernels(native)
        n = 2 if native else 4
        differ, total = trials(model, n, seed=1, deterministic=True, temperature=0)
        drawn, more = trials(model, n, seed=2, deterministic=True, temperature=1.3)
        plain, _ = trials(model, n, seed=1, deterministic=False, temperature=0)
        print(f"\n{name}, {native=}: {differ + drawn} of {total + more} differ, {plain} without")
        assert (differ, drawn) == (0, 0)
    assert plain > 0


@pytest.mark.parametrize("name", [*NAMES, *MORE, "t5", "bart", "marian"])
def test_the_same_numbers(name: str, tmp_path: Path) -> None:
    """It changes last bits and nothing else: log-probabilities are those of the usual way, which is the reference's."""
    model = made(name, tmp_path)
    rows = [random.Random(7).randrange(3, 60) for _ in range(45)]
    source = {} if model.spec.source is None else {"target": rows[20:]}
    text = rows if model.spec.source is None else rows[:20]
    steady = model.score(text, deterministic=True, **source).logprobs
    usual = model.score(text, **source).logprobs
    pairs = [(a, b) for a, b in zip(steady, usual, strict=True) if a is not None and b is not None]
    assert len(pairs) >= 25
    assert max(abs(a - b) for a, b in pairs) <= 1e-4


def test_nothing_of_it_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may change the order of sums, so a steady pass runs the plain blocks."""
    model = made("llama", tmp_path)
    model.transformer.use_kernels(False)
    prompts = [[5, 6, 7], [9] * 14]
    wanted = [bits(one) for one in model.generate(prompts, max_tokens=5, logprobs=0, deterministic=True)]

    def refuse(*_: Any) -> Any:
        raise AssertionError("a steady pass was compiled")

    model.transformer.compile_blocks()
    for runner in model.transformer.decoder.runners:
        monkeypatch.setattr(runner, "_run", refuse)
    found = model.generate(prompts, max_tokens=5, logprobs=0, deterministic=True)
    assert [bits(one) for one in found] == wanted
    with pytest.raises(AssertionError, match="a steady pass was compiled"):  # the usual one is
        model.generate(prompts, max_tokens=5)


def test_more_rows_than_the_head_gets_at_once(tmp_path: Path) -> None:
    model = made("llama", tmp_path)
    prompts = [[3 + i % 50, 5, 9][: 1 + i % 3] for i in range(70)]
    together = model.generate(prompts, max_tokens=3, logprobs=0, deterministic=True)
    for i in (0, 1, 63, 64, 69):
        alone = model.generate(prompts[i], max_tokens=3, logprobs=0, deterministic=True)
        assert bits(alone) == bits(together[i])
    model.transformer.warned_length = True  # what is read is longer than this model was made for
    long = [random.Random(1).randrange(3, 60) for _ in range(600)]
    whole = model.score(long, deterministic=True).logprobs
    assert model.score(long[:301], deterministic=True).logprobs == whole[:301]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_three_hundred(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    assert trials(model, 300, seed=3, most=32, deterministic=True, temperature=0)[0] == 0


@pytest.mark.real
@pytest.mark.slow
def test_smollm2(smollm2_path: Path) -> None:
    model = cutaway.load(smollm2_path)
    differ, total = trials(model, 25, seed=4, most=8, longest=40, deterministic=True, temperature=0)
    readable = cutaway.load(smollm2_path, dtype="float32")
    readable.transformer.use_kernels(False)  # whose sums depend on nobody in any case
    plain, _ = trials(readable, 5, seed=4, most=8, longest=40, deterministic=False, temperature=0)
    print(f"\nSmolLM2: {differ} of {total} differ; {plain} without")
    assert differ == 0
    assert plain > 0


def feeds(model: Model, rows: Sequence[int], cuts: Sequence[int], **kind: Any) -> torch.Tensor:
    session = Session(model.transformer, steady=True, **kind)
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        out = session.feed([rows[start:stop]])
    return out


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
def test_every_cut(name: str, tmp_path: Path) -> None:
    """A text in two pieces, at every place, in many, and after going back."""
    model = made(name, tmp_path)
    chance = random.Random(0)
    rows = [chance.randrange(3, 60) for _ in range(50)]
    model.transformer.use_kernels(False)
    whole = feeds(model, rows, [])
    for cut in range(1, 50, 3):
        assert torch.equal(feeds(model, rows, [cut], paged=cut % 2 == 0), whole)
    model.transformer.use_kernels()
    for text in ([57] * 50, rows):
        whole = feeds(model, text, [])
        for cut in range(1, 50):
            assert torch.equal(feeds(model, text, [cut], paged=cut % 2 == 0), whole)
    assert torch.equal(feeds(model, rows, range(1, 50)), whole)
    session = Session(model.transformer, steady=True)
    session.feed([[*rows, 5, 6, 7]])
    session.rewind([30])
    assert torch.equal(session.feed([rows[30:]]), whole)


def test_with_beams(tmp_path: Path) -> None:
    model = made("llama", tmp_path)
    prompts = [[5, 6, 7], [9] * 14, [3]]
    together = model.generate(prompts, max_tokens=6, num_beams=3, n=2, deterministic=True)
    for i, prompt in enumerate(prompts):
        alone = model.generate(prompt, max_tokens=6, num_beams=3, n=2, deterministic=True)
        for one, other in zip(alone, together[2 * i : 2 * i + 2], strict=True):
            assert (one.tokens, one.score) == (other.tokens, other.score)


SCRIPT = """
import json, sys, torch, cutaway
torch.set_num_threads(int(sys.argv[2]))
model, found = cutaway.load(sys.argv[1], dtype=sys.argv[3] or None), {}
model.transformer.warned_length = True
prompts = [[5, 6, 7], [[9] * 14, [3], [8, 4] * 20, [7] * 5, list(range(3, 63))]]
for native in (True, False):
    model.transformer.use_kernels(native)
    for promise in (True, False):
        lines = found[f"{native=} {promise=}"] = []
        for prompt in prompts:
            how = {"max_tokens": 4, "temperature": 0.8, "seed": 3, "logprobs": 2, "deterministic": promise}
            answer = model.generate(prompt, **how)
            for one in answer if isinstance(answer, list) else [answer]:
                lines += [(e.token, e.logprob.hex(), [v.hex() for _, v in e.top]) for e in one.logprobs]
print(json.dumps(found))
"""


def threaded(source: Path, folder: Path, dtype: str = "") -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """What a model says with one thread, and with two; each in a process of its own."""
    (folder / "script.py").write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    found = []
    for threads in ("1", "2"):
        words = [sys.executable, "-W", "ignore", str(folder / "script.py"), str(source), threads, dtype]
        found.append(json.loads(subprocess.run(words, capture_output=True, check=True, env=environment).stdout))
    for name in found[0]:
        if "promise=True" in name:
            assert found[0][name] == found[1][name]
            assert len(found[0][name]) == 24
    return found[0], found[1]


def test_with_one_thread_or_two(tmp_path: Path) -> None:
    """Of matrices that are large enough to be shared out: without the promise, the maths library's sums do differ."""
    sizes = {"d_model": 512, "n_heads": 8, "n_kv_heads": 2, "layers": 1, "vocab_size": 2048, "d_ff": 1024}
    cutaway.save(cutaway.build(sizes, seed=0), tmp_path / "m", format="cutaway")
    one, two = threaded(tmp_path / "m", tmp_path)
    assert one["native=False promise=False"] != two["native=False promise=False"]


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_with_one_thread_or_two(smollm2_path: Path, tmp_path: Path) -> None:
    """Its stored blocks by the native library, and single precision by the readable blocks."""
    for dtype in ("", "float32"):
        one, two = threaded(smollm2_path, tmp_path, dtype)
        print({name: one[name] == two[name] for name in one})


def test_where_it_cannot_be_kept(tmp_path: Path) -> None:
    experts = made("mixtral-window", tmp_path)
    with pytest.raises(RequestError, match="experts"):
        experts.generate([3], max_tokens=1, deterministic=True)
    with pytest.raises(RequestError, match="deterministic"):
        experts.generate([3], max_tokens=1, deterministic=1)
    # A machine whose products depend on the company.
    plain = torch.nn.functional.linear

    def moody(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return plain(x, *rest) + (1e-6 if x.shape[0] == 8 else 0.0)

    model = made("llama", tmp_path)
    model.transformer.use_kernels(False)
    for module in model.transformer.modules():
        if isinstance(module, (Linear, Head)):
            module.product = moody
    with pytest.raises(RequestError, match="in an order that depends on"):
        model.generate([3], max_tokens=1, deterministic=True)
