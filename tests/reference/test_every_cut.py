"""A prompt of 200 tokens in two pieces, cut at every place, in every kind of cache: the numbers of one plain pass.

What is kept in eight bits has two bounds. It is a plain pass over rounded keys and values: to 1e-4 as well, unless a
number lay on the border of two codes and fell to the other side, where a sum in another order was a bit off. And no
logit moves by more than the half steps that numbers may be rounded by, each times how much the logit depends on it,
added up as if all went the wrong way: to first order, and of what is measured by far the most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

import cutaway
from cutaway.cache import build, pages
from cutaway.cache.int8 import LARGEST, dequantize, quantize
from cutaway.generation.session import Session
from cutaway.inspection import Recorder
from cutaway.models import Transformer
from tests.reference import tiny

Note: TypeAlias = Callable[[str, str, float], float]
N, TOLERANCE = 200, 1e-4
KINDS: dict[str, dict[str, Any]] = {
    "whole": {"sliding": False},
    "ring": {"sliding": True},
    "pages": {"sliding": True, "paged": True},
    "all pages": {"sliding": False, "paged": True},
}
# Windows and none, caps and norms, tables of positions and biases, experts.
NAMES = [
    "llama", "mistral-window", "qwen3", "gemma3", "gemma3-caps", "gemma2", "olmo2", "gptj", "bloom", "mpt", "gpt2",
    "mixtral-window",
]  # fmt: skip
QUICK = "gemma3"


@pytest.fixture
def small_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings and windows' pages hold four tokens beyond the window, which is 8; what is given back is spoilt."""
    monkeypatch.setattr(build, "SLACK", 4)
    monkeypatch.setattr(build, "PAGE", 4)
    monkeypatch.setattr(pages, "POISON", True)


def made(name: str) -> Transformer:
    model = tiny.transformer({**tiny.config(name), **({"n_positions": N + 8} if name == "gpt2" else {})})
    model.warned_length = True  # longer than these say that they were trained for
    return model


def cases() -> Iterator[Any]:
    """A model, a prompt, where to cut it, and in which kind of cache. All but a part is swept slowly."""
    for name in NAMES:
        windows = any(layer.attention.mask.window for layer in tiny.spec_of(tiny.config(name)).decoder.layers)
        for kind in KINDS if windows else ("whole", "pages"):
            cuts = [1, 9, 100, 191, 199] if name == QUICK else range(1, N)
            mark = () if name == QUICK else pytest.mark.slow
            yield pytest.param(name, kind, cuts, marks=mark, id=f"{name}-{kind}")
            if name == QUICK:
                yield pytest.param(name, kind, range(1, N), marks=pytest.mark.slow, id=f"{name}-{kind}-everywhere")


@torch.no_grad()
def cut(model: Transformer, ids: Tensor, at: int, **kind: Any) -> tuple[Tensor, Any]:
    """Logits of a prompt in two pieces, and the cache that it was read with."""
    cache = model.new_cache(capacity=8, **kind)
    return torch.cat([model(part, cache=cache) for part in ids.split([at, ids.shape[1] - at], 1)], 1)[0], cache


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def exact(model: Transformer, ids: Tensor, kind: str, cuts: Any) -> float:
    """The largest difference from one plain pass."""
    with torch.no_grad():
        plain = model(ids)[0]
    return max(far(cut(model, ids, at, **KINDS[kind])[0], plain) for at in cuts)


@pytest.mark.usefixtures("small_stores")
@pytest.mark.parametrize(("name", "kind", "cuts"), [*cases()])
def test_every_cut(name: str, kind: str, cuts: Any, measured: Note) -> None:
    assert measured(name, kind, exact(made(name), tiny.ids(1, N), kind, cuts)) <= TOLERANCE


# ---- eight bits ------------------------------------------------------------------------------------------


def kept(model: Transformer) -> list[str]:
    """The names of what a cache keeps."""
    found = []
    for i, layer in enumerate(model.spec.decoder.layers):
        key = "k" if layer.attention.rotary is None else "k_rot"
        found += [f"decoder.layers.{i}.attn.{name}" for name in (key, "v")]
    return found


@torch.no_grad()
def rounded(model: Transformer, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits of one plain pass over rounded keys and values, and the codes of those."""
    codes: dict[str, Tensor] = {}

    def coarse(x: Tensor, name: str) -> Tensor:
        codes[name] = quantize(x)[0][0]
        return dequantize(*quantize(x), x.dtype)

    tap = Recorder([], {name: [partial(coarse, name=name)] for name in kept(model)})
    return model(ids, tap=tap)[0], [codes[name] for name in kept(model)]


def slopes(model: Transformer, ids: Tensor, wanted: Tensor) -> Tensor:
    """What some logits of the last token may move by: half a step times the slope, summed over all that is kept."""
    moved: list[Tensor] = []
    steps: list[Tensor] = []

    def nudged(x: Tensor) -> Tensor:
        moved.append(torch.zeros_like(x, requires_grad=True))
        steps.append(x.detach().abs().amax(-1, keepdim=True) / LARGEST)
        return x + moved[-1]

    logits = model(ids, tap=Recorder([], {name: [nudged] for name in kept(model)}))[0, -1]
    bounds = []
    for place in wanted.tolist():
        found = torch.autograd.grad(logits[place], moved, retain_graph=True)
        bounds.append(sum(float((g.abs() * step / 2).sum()) for g, step in zip(found, steps, strict=True)))
    return torch.tensor(bounds)


def eight_bits(model: Transformer, ids: Tensor, kind: str, cuts: Any, wanted: Tensor) -> tuple[float, float, int]:
    """Largest differences from rounded numbers (with equal codes) and from exact ones, and codes that differed."""
    with torch.no_grad():
        plain = model(ids)[0]
    (coarse, codes), bound = rounded(model, ids), slopes(model, ids, wanted)
    near, off, differed = 0.0, 0.0, 0
    for at in cuts:
        found, cache = cut(model, ids, at, kv_dtype="int8", **KINDS[kind])
        moved = (found[-1] - plain[-1]).abs()[wanted]
        assert bool((moved <= bound).all()), at
        off = max(off, float((moved / bound).max()))
        if KINDS[kind]["sliding"]:
            continue  # most codes are gone
        state = cache.state()
        mine = [state[f"stores.0.{i}.{x}"] for i in range(len(codes) // 2) for x in "kv"]
        apart = [(a.int() - b.int()).abs() for a, b in zip(mine, codes, strict=True)]
        assert max(int(x.max()) for x in apart) <= 1
        flips = sum(int(x.sum()) for x in apart)
        differed += flips
        if not flips:
            near = max(near, far(found, coarse))
    return near, off, differed


@pytest.mark.usefixtures("small_stores")
@pytest.mark.parametrize(("name", "kind", "cuts"), [*cases()])
def test_every_cut_in_eight_bits(name: str, kind: str, cuts: Any, measured: Note) -> None:
    model, ids = made(name), tiny.ids(1, N)
    wanted = torch.arange(0, 64, 16 if name == QUICK and len(cuts) < 9 else 4)
    near, off, differed = eight_bits(model, ids, kind, cuts, wanted)
    assert measured(f"{name}, int8 of bound", kind, off) <= 1
    if KINDS[kind]["sliding"]:
        return
    total = len(cuts) * N * sum(2 * a.n_kv_heads * a.d_head for a in (x.attention for x in model.spec.decoder.layers))
    print(f"\n{name}, {kind}: at most {off:.3f} of the bound; {differed} of {total:,} codes fell to the other side")
    assert differed <= 1e-4 * total
    assert measured(f"{name}, int8", kind, near) <= TOLERANCE


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "gpt2"])
def test_every_cut_in_eight_bits_has_the_same_bits(name: str, paged: bool) -> None:
    """In a steady session, where sums have one order, no number falls to another side."""
    model, prompt = made(name), tiny.ids(1, N)[0].tolist()
    cuts = [3, 64, 121] if name != QUICK else [1, 100, 199]
    wanted = Session(model, steady=True, kv_dtype="int8", paged=paged).feed([prompt])
    for at in cuts:
        session = Session(model, steady=True, kv_dtype="int8", paged=paged)
        session.feed([prompt[:at]])
        assert torch.equal(session.feed([prompt[at:]]), wanted)


# ---- sessions --------------------------------------------------------------------------------------------


def sessions(model: Transformer, prompt: list[int], cuts: Any, folder: Path, **kind: Any) -> dict[str, float]:
    """Forked at the cut, rewound to it (far past a window), and saved and loaded there: the largest differences."""
    with torch.no_grad():
        plain = model(torch.tensor([prompt]))[0]
    found = dict.fromkeys(("at the cut", "forked", "rewound", "saved"), 0.0)

    def note(word: str, logits: Tensor, place: int) -> None:
        found[word] = max(found[word], far(logits[0], plain[place]))

    growing, whole = Session(model, **kind), Session(model, **kind)
    whole.feed([prompt])
    for at in cuts:
        note("at the cut", growing.feed([prompt[len(growing.tokens[0]) : at]]), at - 1)
        note("forked", growing.fork().feed([prompt[at:]]), -1)
        growing.save(folder / "a")
        note("saved", Session.load(model, folder / "a").feed([prompt[at:]]), -1)
        # After something else was read there.
        whole.rewind([at])
        whole.feed([[5, 6, 7]])
        whole.rewind([at])
        note("rewound", whole.feed([prompt[at:]]), -1)
    return found


@pytest.mark.usefixtures("small_stores")
@pytest.mark.parametrize("paged", [False, True], ids=["plain", "paged"])
@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        (QUICK, [1, 60, 141, 199]),
        *(pytest.param(name, range(1, N), marks=pytest.mark.slow, id=name) for name in NAMES),
    ],
)
def test_sessions(name: str, cuts: Any, paged: bool, tmp_path: Path, measured: Note) -> None:
    found = sessions(made(name), tiny.ids(1, N)[0].tolist(), cuts, tmp_path, paged=paged)
    for word, value in found.items():
        assert measured(name, word, value) <= TOLERANCE, word


# ---- a real model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[Transformer, list[int]]:
    model = cutaway.load(smollm2_path)
    assert model.tokenizer is not None
    text = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    return model.transformer, model.tokenizer.encode(text)[:N]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["whole", "pages"])
def test_smollm2(smollm2: tuple[Transformer, list[int]], kind: str, measured: Note) -> None:
    model, prompt = smollm2
    assert measured("SmolLM2", kind, exact(model, torch.tensor([prompt]), kind, range(1, N))) <= TOLERANCE


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["whole", "all pages"])
def test_smollm2_in_eight_bits(smollm2: tuple[Transformer, list[int]], kind: str, measured: Note) -> None:
    model, prompt = smollm2
    with torch.no_grad():
        wanted = model(torch.tensor([prompt]))[0, -1].topk(5).indices
    near, off, differed = eight_bits(model, torch.tensor([prompt]), kind, range(1, N), wanted)
    print(f"\nSmolLM2, {kind}: at most {off:.4f} of the bound; {differed} of {199 * N * 30 * 2 * 192:,} codes differ")
    assert measured("SmolLM2, int8", kind, near) <= TOLERANCE


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("paged", [False, True], ids=["plain", "paged"])
def test_smollm2_sessions(smollm2: tuple[Transformer, list[int]], paged: bool, tmp_path: Path, measured: Note) -> None:
    model, prompt = smollm2
    for word, value in sessions(model, prompt, range(1, N), tmp_path, paged=paged).items():
        assert measured("SmolLM2, paged" if paged else "SmolLM2", word, value) <= TOLERANCE, word
