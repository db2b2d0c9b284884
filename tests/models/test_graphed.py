"""Steps with a fixed place for every token give what steps with a cache give. Capturing itself needs CUDA."""

from __future__ import annotations

import pytest
import torch
from tests.reference import tiny

from cutaway.errors import ContextExceeded, RequestError
from cutaway.generation.session import Session
from cutaway.models.graphed import GraphedDecoder

NAMES = ["llama", "qwen3", "gemma3", "gpt2", "phi", "gpt-neox", "mistral-window", "granite", "olmo2"]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_logits_as_a_session(name: str) -> None:
    """Ragged prompts, then steps past every window; twice, so that old keys would show."""
    model = tiny.transformer(name)
    vocab, source = model.spec.vocab_size, torch.Generator().manual_seed(0)
    graphed = GraphedDecoder(model, 3, 40)
    for lengths in ((19, 7, 12), (3, 16, 8)):
        rows = [torch.randint(vocab, (n,), generator=source).tolist() for n in lengths]
        session = Session(model, 3)
        expected, got = session.feed(rows), graphed.read(rows)
        for _ in range(20):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            tokens = torch.randint(vocab, (3,), generator=source)
            expected, got = session.feed(tokens[:, None].tolist()), graphed.step(tokens)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_room_ends() -> None:
    graphed = GraphedDecoder(tiny.transformer("llama"), 1, 6)
    with pytest.raises(ContextExceeded):
        graphed.read([[1] * 7])
    graphed.read([[1] * 5])
    graphed.step(torch.tensor([1]))
    with pytest.raises(ContextExceeded):
        graphed.step(torch.tensor([1]))


@pytest.mark.parametrize(("name", "why"), [("bloom", "distance"), ("mixtral", "experts"), ("gemma2", "cap")])
def test_what_a_graph_cannot_hold_is_refused(name: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        GraphedDecoder(tiny.transformer(name), 1, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="capturing a graph needs CUDA")
def test_a_replay_is_the_same_as_the_operations_one_by_one() -> None:
    model = tiny.transformer("llama").to("cuda")
    graphed, session = GraphedDecoder(model, 2, 32), Session(model, 2)
    rows = [[1, 2, 3], [4, 5, 6, 7]]
    expected, got = session.feed(rows), graphed.read(rows)
    for token in range(12):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        expected, got = session.feed([[token]] * 2), graphed.step(torch.tensor([token] * 2, device="cuda"))
