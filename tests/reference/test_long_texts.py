"""Rotary positions that change with the length of the text: dynamic NTK and LongRoPE, on both sides of the boundary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.generation import passes as session_module
from cutaway.generation.session import Session
from cutaway.models import Transformer
from cutaway.modules.rotary import text_lengths
from tests.reference import oracle, tiny
from tests.reference.conftest import open_folder

Note = Callable[[str, str, float], float]
ORIGINAL = 16

LONG: dict[str, dict[str, Any]] = {
    "dynamic": tiny._llama(**tiny._rope("dynamic", factor=3.0), max_position_embeddings=ORIGINAL),
    "dynamic-factor": tiny._llama(**tiny._rope("dynamic", 900.0, factor=1.5), max_position_embeddings=ORIGINAL),
    "longrope": tiny._phi3(**tiny._longrope(4, ORIGINAL)),
    "longrope-partial": tiny._phi3(**tiny._longrope(2, ORIGINAL, partial_rotary_factor=0.5), sliding_window=8),
    "longrope-factors": tiny._phi3(**tiny._longrope(4, ORIGINAL, factor=32.0, attention_factor=1.3)),
}
LENGTHS = (10, ORIGINAL, ORIGINAL + 1, 40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny.write(values, tmp_path_factory.mktemp("long") / name) for name, values in LONG.items()}


@pytest.fixture(params=LONG)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@torch.no_grad()
def test_logits_at_every_length(folder: Path, measured: Note) -> None:
    """Short, just as long as trained, one longer, and much longer."""
    model = open_folder(folder)
    for n in LENGTHS:
        ids = tiny.ids(2, n, seed=n)
        theirs = oracle.logits(folder, ids)
        for how in ("fused", "explicit", "blockwise"):
            model.attention = how
            assert measured(folder.name, f"{n} tokens", apart(model(ids), theirs)) <= 1e-4


@torch.no_grad()
def test_the_boundary_shows(folders: dict[str, Path]) -> None:
    """One token more, and the first token's successor is another: these tests see which list was taken."""
    for name in ("longrope", "longrope-partial", "longrope-factors"):
        model, ids = open_folder(folders[name]), tiny.ids(1, ORIGINAL + 1)
        assert apart(model(ids)[:, :ORIGINAL], model(ids[:, :ORIGINAL])) > 0.05


@torch.no_grad()
def test_rows_of_several_lengths(folder: Path, measured: Note) -> None:
    """Each text in a batch, and each document in a row, has its own length (the reference takes the longest's)."""
    model = open_folder(folder)
    texts = [tiny.ids(1, n, seed=n) for n in LENGTHS]
    alone = [oracle.logits(folder, text) for text in texts]
    ids, positions = tiny.ids(4, 40, seed=9), torch.full((4, 40), -1)
    for row, text in enumerate(texts):
        ids[row, 40 - text.shape[1] :], positions[row, 40 - text.shape[1] :] = text[0], torch.arange(text.shape[1])
    logits = model(ids, positions)
    for row, text in enumerate(texts):
        assert measured(folder.name, "padded", apart(logits[row, 40 - text.shape[1] :], alone[row][0])) <= 1e-4
    packed = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    segments = torch.cat([torch.full((text.shape[1],), i) for i, text in enumerate(texts)])[None]
    logits = model(torch.cat(texts, 1), packed, segments)
    for part, one in zip(logits.split([text.shape[1] for text in texts], 1), alone, strict=True):
        assert measured(folder.name, "packed", apart(part, one)) <= 1e-4


def test_lengths_of_texts() -> None:
    positions = torch.tensor([[-1, 0, 1, 2, 0, 1], [0, 1, 2, 3, -1, -1]])
    assert text_lengths(positions).tolist() == [[3] * 6, [4] * 6]
    segments = torch.tensor([[0, -1, -1, 0, 1, 1], [0, 0, 0, 0, 3, 3]])  # −1: the prefix of document 0
    assert text_lengths(positions, segments).tolist() == [[3, 3, 3, 3, 2, 2], [4, 4, 4, 4, 0, 0]]


@torch.no_grad()
def test_capacity_decides_nothing(folder: Path) -> None:
    """Case L06: room for the original length, for twice it, or for none: the same logits, the reference's."""
    model = open_folder(folder)
    for n in (10, 20):
        ids = tiny.ids(1, n)
        theirs = oracle.logits(folder, ids)
        found = [model(ids, cache=model.new_cache(capacity=capacity)) for capacity in (8, ORIGINAL, 2 * ORIGINAL, 200)]
        assert all(torch.equal(one, found[0]) for one in found)
        assert apart(found[0], theirs) <= 1e-4


@torch.no_grad()
def test_a_prompt_in_pieces_is_read_as_a_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session knows how long the prompt is before it reads the first piece."""
    model = open_folder(folder)
    rows = [tiny.ids(n, seed=n).tolist() for n in LENGTHS]
    wanted = torch.stack([oracle.logits(folder, torch.tensor([row]))[0, -1] for row in rows])
    for size in (6, 17, 512):
        monkeypatch.setattr(session_module, "CHUNK", size)
        model.warned_length = True  # that the texts are longer than trained is said elsewhere
        assert apart(Session(model, len(rows)).feed(rows), wanted) <= 1e-4


def crossing(model: Transformer, ids: Tensor, first: int) -> Tensor:
    cache = model.new_cache()
    return torch.cat([model(part, cache=cache) for part in ids.split([first] + [1] * (ids.shape[1] - first), 1)], 1)


@torch.no_grad()
def test_generation_across_the_boundary(folder: Path) -> None:
    """Up to the boundary a generated text is as if read at once. Past it, cached keys keep the angles they got.

    That is what transformers does with a cache in hand, for dynamic NTK. For LongRoPE its ``generate`` throws the
    cache away once, at the boundary; ours goes on.
    """
    model, ids = open_folder(folder), tiny.ids(1, 24)
    stepped = crossing(model, ids, 10)
    assert apart(stepped[:, :ORIGINAL], oracle.logits(folder, ids[:, :ORIGINAL])) <= 1e-4
    reference = oracle.fresh(folder)
    from transformers import DynamicCache

    cache, theirs = DynamicCache(config=reference.config), []
    for part in ids.split([10] + [1] * 14, 1):
        theirs.append(reference(input_ids=part, cache=cache, use_cache=True).logits)
    assert apart(stepped, torch.cat(theirs, 1)) <= 1e-4
    assert apart(stepped, oracle.logits(folder, ids)) > 1e-3
    # Text that is beyond it from the start goes on as the long text it is: LongRoPE's angles do not change any more.
    if "longrope" in folder.name:
        assert apart(crossing(model, ids, ORIGINAL + 1)[:, ORIGINAL:], oracle.logits(folder, ids)[:, ORIGINAL:]) <= 1e-4


def test_gradients_of_long_texts(folder: Path, measured: Note) -> None:
    ids = tiny.ids(1, 30)
    ours, theirs = open_folder(folder), oracle.fresh(folder)
    weigh = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(5)) / 10
    (ours(ids) * weigh).sum().backward()
    (theirs(input_ids=ids, use_cache=False).logits * weigh).sum().backward()
    one, other = ours.embed.tokens.grad, theirs.get_input_embeddings().weight.grad
    assert one is not None
    assert measured(folder.name, "gradient", float((one - other).norm() / other.norm())) <= 1e-4


@torch.no_grad()
def test_channels_that_do_not_turn(folders: dict[str, Path]) -> None:
    """Case L07: past the share that turns, q and k do not change with the position."""
    from cutaway.inspection import Recorder

    model, ids = open_folder(folders["longrope-partial"]), tiny.ids(1, 1).expand(1, 20)
    names = [f"decoder.layers.0.attn.{name}" for name in ("q", "k", "q_rot", "k_rot")]
    tap = Recorder(names)
    model(ids, tap=tap)
    q, k, q_rot, k_rot = (tap.kept[name][0] for name in names)
    assert torch.equal(q_rot[..., 4:], q[..., 4:])
    assert torch.equal(k_rot[..., 4:], k[..., 4:])
    assert bool((q_rot[:, 1:, :, :4] != q[:, 1:, :, :4]).any(1).all())
