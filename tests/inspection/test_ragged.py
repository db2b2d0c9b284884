"""Texts of different lengths, together, through prefill and every cached step: the rows of one uncached pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cutaway
from cutaway.cache import build
from cutaway.inspection import Recorder, Trace, trace
from cutaway.models import Transformer
from cutaway.spec.names import tap_names
from tests.inspection.against import pair
from tests.inspection.memory import bytes_alive
from tests.reference import tiny, tiny_encoders, tiny_seq2seq

LENGTHS, MORE = (13, 4, 9), 5  # the windows are of 8
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def prompts(vocab: int = 60) -> list[list[int]]:
    random = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab, (n,), generator=random).tolist() for n in LENGTHS]


@torch.no_grad()
def whole(model: Transformer, ids: list[int], source: list[int] | None = None) -> dict[str, Tensor]:
    """Everything of one text, alone, in one plain pass."""
    tap = Recorder.of(model.spec, "*")
    read = None if source is None else model.read(torch.tensor([source]), tap=tap)
    model(torch.tensor([ids]), source=read, tap=tap)
    return {name: kept[0] for name, kept in tap.kept.items()}


def is_rows_of_one_pass(model: Transformer, found: Trace) -> float:
    """Each row is what the text alone gives; past its end there is nothing."""
    most = 0.0
    names = tap_names(model.spec)
    assert list(found) == list(names)
    longest = max(found.lengths)
    for i, ids in enumerate(found.tokens):
        alone = whole(model, ids, None if found.sources is None else found.sources[i])
        row = found.row(i)
        assert row.tokens == [ids]
        for name, tensor in row.items():
            full = alone[name]
            assert tensor.shape == full.shape, name
            assert not bool(tensor.isnan().any()), name
            assert torch.equal(tensor.isinf(), full.isinf()), name
            if "key" in names[name]:
                assert torch.equal(tensor == 0, full == 0), name
            most = max(most, float(torch.where(tensor == full, 0.0, (tensor - full).abs()).max()))
            torch.testing.assert_close(tensor, full, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
        ends = {"query": len(ids), "key": len(ids)}
        if found.sources is not None:
            ends |= dict.fromkeys(("source", "source_key"), len(found.sources[i]))
        for name, tensor in found.items():
            for axis, word in enumerate(found.axes[name][1:], 1):
                n = ends.get(word, tensor.shape[axis])
                assert bool(tensor[i : i + 1].narrow(axis, n, tensor.shape[axis] - n).isnan().all()), (name, word)
    assert all(
        tensor.shape[names[name].index("query")] == longest for name, tensor in found.items() if "query" in names[name]
    )
    return most


@pytest.mark.parametrize("case", [*tiny.FAMILIES, "llama-biases", "qwen2-sliding", "gpt2-untied"])
def test_a_ragged_answer(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SLACK", 2)  # a ring, were one used, would go round
    model, ids = tiny.transformer(case), prompts()
    free = trace(model, ids, (), max_tokens=MORE)
    assert free.lengths == [n + MORE for n in LENGTHS]
    end = free.tokens[1][LENGTHS[1] + 1]  # the second row's second token ends it, and perhaps others
    found = trace(model, ids, ("*",), max_tokens=MORE, stop_ids={end})
    for got, there, n in zip(found.tokens, free.tokens, LENGTHS, strict=True):
        assert got == there[: len(got)]  # no token depends on who has ended
        assert len(got) == len(there) or got[-1] == end
        assert end not in got[n:-1]
    assert LENGTHS[1] < len(found.tokens[1]) <= LENGTHS[1] + 2 < max(found.lengths)
    most = is_rows_of_one_pass(model, found)
    print(f"{case}: ragged {most:.1e}")


@pytest.mark.parametrize("case", tiny_seq2seq.FAMILIES)
def test_ragged_sources(case: str) -> None:
    """Encoder, decoder and cross attention, each row's own source among longer ones."""
    model = tiny_seq2seq.transformer(case)
    sources, ids = prompts(), [[2, 5, 7], [2], [2, 9]]
    free = trace(model, ids, (), max_tokens=MORE, sources=sources)
    end = free.tokens[1][2]
    found = trace(model, ids, ("*",), max_tokens=MORE, sources=sources, stop_ids={end})
    assert found.source_lengths == list(LENGTHS)
    assert len(set(found.lengths)) > 1
    most = is_rows_of_one_pass(model, found)
    once = trace(model, found.tokens, ("*",), sources=sources)  # the same, read at once
    for name, tensor in once.items():
        torch.testing.assert_close(tensor, found[name], **CLOSE, equal_nan=True)
    print(f"{case}: ragged {most:.1e}")


@pytest.mark.parametrize("case", [*tiny_encoders.ONE_EACH, "bert-labels", "roberta-tokens", "modernbert-mean"])
def test_ragged_encoders(case: str, tmp_path: Path) -> None:
    model = cutaway.load(tiny_encoders.write(tiny_encoders.config(case), tmp_path)).transformer
    found = trace(model, prompts(), ("*",))
    most = is_rows_of_one_pass(model, found)
    print(f"{case}: ragged {most:.1e}")


@pytest.mark.parametrize("options", [{"max_tokens": 2}, {"stop": True}, {}])
def test_fifty_captures_are_fifty_tensors(options: dict[str, Any]) -> None:
    """Case I05, ragged: whichever way they are run, and after an edit has raised."""
    model, name = tiny.transformer("llama"), "decoder.layers.1.attn.z"

    def fail(value: Tensor) -> Tensor:
        raise ValueError("mine")

    size = trace(model, prompts(), (name,), **options)[name].nbytes
    before = bytes_alive()
    held = [trace(model, prompts(), (name,), **options) for _ in range(50)]
    assert bytes_alive() - before == 50 * size
    for _ in range(3):
        with pytest.raises(ValueError, match="mine"):
            trace(model, prompts(), ("*.attn.*",), {name: fail}, **options)
    assert bytes_alive() - before == 50 * size
    del held
    assert bytes_alive() == before


@pytest.mark.parametrize("case", ["gpt2", "gemma2", "bert-mlm"])
def test_a_ragged_stream_is_the_references(case: str, tmp_path: Path) -> None:
    """transformers' hidden states and scores of the same rows, padded and masked."""
    both = pair(case, tmp_path / case)
    rows = [[5, 9, 17, 7, 30, 11, 40], [5, 9, 33], [8]]
    ids, mask = (torch.zeros(3, 7, dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    with torch.no_grad():
        wanted = both.theirs(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    found, main = trace(both.ours, rows, ("*.resid_in", "*.norm.out", "logits")), both.ours.spec.main
    states = [*(f"{main}.layers.{i}.resid_in" for i in range(both.layers)), f"{main}.norm.out"]
    for i, row in enumerate(rows):
        for name, state in zip((*states, "logits"), (*wanted.hidden_states, wanted.logits), strict=True):
            torch.testing.assert_close(found.row(i)[name][0], state[i, : len(row)], **CLOSE)
