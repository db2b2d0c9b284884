"""What is measured, and what is reckoned from it; never how long anything took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutaway
from cutaway import measure
from cutaway.errors import RequestError
from cutaway.measure import cache_bytes, measured, peak_bytes, step_bytes, weight_bytes

# 2 layers of 4 heads of 8: q, k, v, o of 32 × 32, an mlp of 32 to 128 and back, two norms; 64 rows of 32.
WORDS: dict[str, Any] = {"d_model": 32, "n_heads": 4, "layers": 2, "vocab_size": 64, "norm": "rms", "d_ff": 128}
SMALL: dict[str, Any] = {"prompt_len": 12, "gen": 4, "batch": 3, "rounds": 2, "buffer": 1 << 16}


def built(**more: Any) -> cutaway.Model:
    return cutaway.build({**WORDS, **more})


def numbers(model: cutaway.Model, *parts: str) -> int:
    return sum(p.numel() for name, p in model.transformer.named_parameters() if name.startswith(parts))


def test_a_token_reads_every_weight_but_an_untied_table() -> None:
    tied, apart = built(tied=True), built(tied=False)
    assert step_bytes(tied.transformer) == weight_bytes(tied.transformer) == 4 * numbers(tied, "")
    assert step_bytes(apart.transformer) == weight_bytes(apart.transformer) - 4 * 64 * 32
    half = built(tied=True)
    half.transformer.to(torch.bfloat16)
    assert 2 * step_bytes(half.transformer) == step_bytes(tied.transformer)


def test_of_experts_a_token_reads_those_that_are_chosen() -> None:
    model = built(experts=4, tied=True).transformer
    experts = sum(p.nbytes for name, p in model.named_parameters() if p.dim() == 3)
    assert experts == 4 * 2 * 3 * 32 * 128 * 4  # experts, layers, matrices
    assert step_bytes(model) == weight_bytes(model) - experts // 2  # two of four


def test_a_tokens_cache_is_what_the_cache_holds_but_no_more_than_a_window() -> None:
    model = built()
    held = [model.transformer.new_cache(1, n).nbytes for n in (16, 32)]
    assert cache_bytes(model.spec, 16, 4) == 16 * 2 * (2 * 4 * 8 * 4) == held[1] - held[0]
    ring = built(pattern=["local", "global"], window=5)
    assert cache_bytes(ring.spec, 16, 4) == (5 + 16) * 2 * 4 * 8 * 4


def test_figures_of_a_model_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share is what was read, weights once a step and each row's cache, over how fast memory was read."""
    speeds = iter([8.0, 2.0, 4.0])
    monkeypatch.setattr(measure, "_read_speed", lambda memory: next(speeds))
    model = built(tied=True)
    (memory, prefill, decode, batch), _ = measured(model, **SMALL)
    assert memory.values == [2.0, 4.0]  # the first round only warms up
    assert [figure.name for figure in (prefill, decode, batch)] == ["prefill 12", "decode 4", "batch 3 × 4"]
    assert prefill.shares == memory.shares == []
    for figure, rows in ((decode, 1), (batch, 3)):
        assert len(figure.values) == len(figure.shares) == 2
        for rate, share, speed in zip(figure.values, figure.shares, memory.values, strict=True):
            read = 4 * numbers(model, "") + rows * cache_bytes(model.spec, 16 + 2, 4)
            assert share == pytest.approx(rate / rows * read / (speed * 1e9))


def test_what_is_run_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = built(), []
    generate: Callable[..., Any] = model.generate

    def watched(prompts: Any, **options: Any) -> Any:
        answers = generate(prompts, **options)
        calls.append((len(prompts), len(prompts[0]), [len(answer.tokens) for answer in answers]))
        return answers

    monkeypatch.setattr(cutaway.Model, "generate", lambda self, prompts, **options: watched(prompts, **options))
    measured(model, **SMALL)
    assert calls == 3 * [(1, 12, [1]), (1, 16, [4]), (3, 16, [4, 4, 4])]


def test_a_table_of_positions_is_not_outgrown() -> None:
    model = built(positions="learned", max_positions=20)
    assert [figure.name for figure in measured(model, **{**SMALL, "prompt_len": 512})[0]][1] == "prefill 16"
    with pytest.raises(RequestError, match="before so many tokens") as caught:
        measured(model, **{**SMALL, "gen": 20})
    assert caught.value.field == "gen"


@pytest.mark.parametrize("name", ["prompt_len", "gen", "batch", "rounds"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_numbers_that_make_no_sense(name: str, value: Any) -> None:
    with pytest.raises(RequestError):
        measured(built(), **{**SMALL, name: value})


def test_the_buffer_is_not_counted_as_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is asked for before there is a buffer."""
    order: list[str] = []
    ones = torch.ones
    monkeypatch.setattr(measure, "peak_bytes", lambda: order.append("peak") or 7)
    monkeypatch.setattr(torch, "ones", lambda *a, **k: order.append(f"ones {a[0]}") or ones(*a, **k))
    assert measured(built(), **SMALL)[1] == 7
    assert order.index("peak") < order.index(f"ones {(1 << 16) // 4}")


def test_the_peak_is_at_least_what_is_held() -> None:
    peak = peak_bytes()
    assert peak is None or peak > 50 << 20  # torch alone takes more
