"""Neighbours, analogies and planes against plain products of the whole table."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.inspection import analogy, neighbours, plane, readout
from cutaway.kernels import Stored
from cutaway.models import Transformer
from tests.reference import tiny, tiny_encoders, tiny_seq2seq


@pytest.fixture
def model() -> Transformer:
    return tiny.transformer("gpt-neox")  # two tables


def by_hand(table: Tensor, vector: Tensor, by: str) -> Tensor:
    if by == "dot":
        return table @ vector
    if by == "cosine":
        return torch.nn.functional.cosine_similarity(table, vector[None])
    return torch.cdist(vector[None], table)[0]


@pytest.mark.parametrize("by", ["cosine", "dot", "euclid"])
@pytest.mark.parametrize("table", ["input", "output"])
def test_neighbours(model: Transformer, by: Any, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout, "LARGEST", 7 * 32)  # seven rows at a time
    rows = (model.embed.tokens if table == "input" else model.head.weight).detach()
    values = by_hand(rows, rows[9], by)
    order = values.argsort(descending=by != "euclid").tolist()
    order.remove(9)
    found = neighbours(model, 9, k=5, by=by, table=table)
    assert found.tokens == tuple(order[:5])
    torch.testing.assert_close(torch.tensor(found.values), values[order[:5]], rtol=1e-5, atol=1e-5)

    # Of a vector nothing is left out but what is said; all but these may be asked for.
    every = neighbours(model, rows[9], k=1000, by=by, table=table, leave_out=[order[0]])
    assert len(every.tokens) == len(rows) - 1
    assert order[0] not in every.tokens


@pytest.mark.parametrize("by", ["cosine", "dot"])
def test_analogies(model: Transformer, by: Any) -> None:
    rows = model.embed.tokens.detach()
    three = rows[[5, 6, 7]]
    three = three / three.norm(dim=-1, keepdim=True) if by == "cosine" else three
    values = by_hand(rows, three[0] - three[1] + three[2], by)
    values[[5, 6, 7]] = -math.inf
    found = analogy(model, 5, 6, 7, k=4, by=by, spell=lambda t: f"w{t}")
    assert found.tokens == tuple(values.topk(4).indices.tolist())
    assert found.what == "“w5” − “w6” + “w7”"
    assert found.words[0] == f"w{found.tokens[0]}"


def test_a_plane_by_components(model: Transformer) -> None:
    """Distances in it are those of the words' best flat picture (torch's own PCA)."""
    ids = [4, 8, 15, 16, 23, 42]
    rows = model.embed.tokens.detach()[ids]
    _, spread, basis = torch.pca_lowrank(rows, q=5, niter=20)
    found = plane(model, ids)
    torch.testing.assert_close((found.axes @ basis[:, :2]).abs(), torch.eye(2), rtol=0, atol=1e-4)
    shares = spread.pow(2) / (rows - rows.mean(0)).pow(2).sum()
    torch.testing.assert_close(torch.tensor(found.share), shares[:2], rtol=1e-4, atol=1e-6)
    flat = (rows - rows.mean(0)) @ basis[:, :2]
    torch.testing.assert_close(torch.pdist(found.points), torch.pdist(flat), rtol=1e-4, atol=1e-5)
    assert plane(model, ids).points.equal(found.points)


def test_a_plane_by_pairs(model: Transformer) -> None:
    rows = model.embed.tokens.detach()
    found = plane(model, [1, 2, 3, 4, 5], pairs=[(1, 2), (3, 4)])
    torch.testing.assert_close(found.axes @ found.axes.t(), torch.eye(2), rtol=0, atol=1e-6)
    first = rows[2] - rows[1]
    torch.testing.assert_close(found.axes[0], first / first.norm())
    # The pair of an axis stands on both sides of its middle, and the whole of it lies along the axis.
    half = float(first.norm() / 2)
    torch.testing.assert_close(found.points[:2, 0], torch.tensor([-half, half]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.points[:2, 1], torch.zeros(2), rtol=0, atol=1e-6)
    second = found.points[3] - found.points[2]
    torch.testing.assert_close(second, found.axes @ (rows[4] - rows[3]), rtol=1e-5, atol=1e-6)
    one = plane(model, [1, 2, 3, 4, 5], pairs=[(1, 2)])
    assert one.named[1] == "component 2"
    torch.testing.assert_close(one.axes[0], found.axes[0])
    assert abs(float(one.axes[0] @ one.axes[1])) < 1e-6


def test_a_stored_table_is_never_made_whole(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of rows at a time; and the numbers are those of the stored form."""
    table = torch.randn(400, 32).half()
    stored = Stored(table.view(torch.uint8), 1, 32)
    monkeypatch.setattr(model.embed, "tokens", torch.nn.Parameter(stored, requires_grad=False))
    made: list[int] = []
    expand = type(stored.native).expand

    def watched(self: Any, matrix: Any, ids: Tensor | None = None) -> Tensor:
        made.append(400 if ids is None else ids.numel())
        return expand(self, matrix, ids) if ids is not None else expand(self, matrix)

    monkeypatch.setattr(type(stored.native), "expand", watched)
    monkeypatch.setattr(readout, "LARGEST", 50 * 32)
    found = neighbours(model, 9, k=3)
    assert max(made) == 50
    assert sum(made) == 401
    values = by_hand(table.float(), table[9].float(), "cosine")
    assert found.tokens == tuple(values.argsort(descending=True)[1:4].tolist())


def test_tables() -> None:
    """Tied, an output table is the input's; a source may have its own; a model without a head has no output."""
    tied = tiny.transformer("llama-tied" if "llama-tied" in tiny.CASES else "gemma3")
    assert neighbours(tied, 5, table="output").values == neighbours(tied, 5).values
    two = tiny_seq2seq.transformer("marian-two-tables")
    assert neighbours(two, 79, table="source", k=100).tokens != ()
    assert len(neighbours(two, 5, k=100).tokens) == 63
    with pytest.raises(RequestError, match="no such table"):
        neighbours(tied, 5, table="source")
    with pytest.raises(RequestError, match="no head"):
        neighbours(tiny.transformer(tiny_encoders.config("bert")), 5, table="output")


def test_refusals(model: Transformer) -> None:
    with pytest.raises(RequestError):
        neighbours(model, 64)
    with pytest.raises(RequestError, match="likeness"):
        neighbours(model, 1, by="near")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="not a vector"):
        neighbours(model, torch.zeros(31))
    with pytest.raises(RequestError, match="too few words"):
        plane(model, [1, 2])
    with pytest.raises(RequestError, match="span no plane"):
        plane(model, [1, 2, 3], pairs=[(1, 2), (2, 1)])
    with pytest.raises(RequestError, match="too many"):
        plane(model, [1, 2, 3], pairs=[(1, 2), (2, 3), (4, 5)])


def test_shown(model: Transformer) -> None:
    found = neighbours(model, 9, k=2)
    assert found.figure().parts[0].labels == found.words
    assert found.as_dict()["tokens"] == [*found.tokens]
    flat = plane(model, [1, 2, 3], spell=lambda t: f"w{t}")
    assert [row[0] for row in flat.figure().parts[0].rows] == ["w1", "w2", "w3"]
    assert sum(flat.share) == pytest.approx(1.0, abs=1e-5)  # three points are flat
    assert flat.as_dict()["points"] == flat.points.tolist()
