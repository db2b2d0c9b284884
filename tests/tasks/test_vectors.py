"""Sentence vectors, against sentence-transformers."""

from __future__ import annotations

import inspect
import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cutaway
from cutaway.checkpoints.sentence import read_sentence, sentence_files
from cutaway.errors import ConfigError, RequestError, UnsupportedModelError
from cutaway.spec.sentence import SentenceSettings
from tests.conftest import _models
from tests.tasks.small import TEXTS, write


def sentences(n: int) -> list[str]:
    """Real sentences: those of the standard library's documentation."""
    import argparse
    import asyncio
    import collections
    import difflib
    import logging
    import pathlib
    import threading

    rooms = (argparse, asyncio, collections, difflib, logging, pathlib, threading)
    found: list[str] = []
    for room in rooms:
        for _, thing in sorted(inspect.getmembers(room, lambda x: inspect.isclass(x) or inspect.isfunction(x))):
            text = " ".join((inspect.getdoc(thing) or "").split())
            found += [part for part in re.split(r"(?<=[.!?]) ", text) if len(part.split()) > 3]
    found = list(dict.fromkeys(found))
    assert len(found) >= n
    return found[:n]


@pytest.fixture(scope="module")
def minilm() -> Any:
    path = _models() / "minilm"
    assert (path / "model.safetensors").exists(), f"{path} is missing: run `make models`"
    return path


@pytest.mark.real
def test_minilm_is_sentence_transformers(minilm: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = sentences(200)
    assert max(map(len, texts)) > 200
    model, reference = cutaway.load(minilm), SentenceTransformer(str(minilm), device="cpu")
    theirs = torch.from_numpy(np.asarray(reference.encode(texts, batch_size=16)))
    ours = model.embed(texts)
    worst = (ours - theirs).abs().max().item()
    print(f"\nMiniLM, 200 sentences: max |Δ| {worst:.2e}")
    assert worst <= 1e-5
    # Whatever the neighbours and the order.
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    assert (model.embed([texts[i] for i in order]) - ours[order]).abs().max() <= 1e-5
    alone = torch.cat([model.embed(text) for text in texts[:40]])
    assert (alone - ours[:40]).abs().max() <= 1e-5


@pytest.mark.real
def test_minilm_saved_is_read_by_sentence_transformers(minilm: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = sentences(20)
    model = cutaway.load(minilm)
    ours = model.embed(texts)
    cutaway.save(model, tmp_path / "copy")
    again = cutaway.load(tmp_path / "copy")
    assert again.sentence == model.sentence
    assert torch.equal(again.embed(texts), ours)
    theirs = SentenceTransformer(str(tmp_path / "copy"), device="cpu").encode(texts)
    assert (torch.from_numpy(np.asarray(theirs)) - ours).abs().max() <= 1e-5


@pytest.mark.parametrize("pool", ["mean", "cls", "last", "max"])
@pytest.mark.parametrize("normalize", [False, True])
def test_every_pooling(tmp_path: Path, pool: str, normalize: bool) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write(tmp_path / "bert", "BertModel")
    settings = SentenceSettings(pool, normalize, 20, prompts=(("query", "the order: "),), default_prompt="query")  # type: ignore[arg-type]
    for name, data in sentence_files(settings, 32).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    assert read_sentence(folder) == settings
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    model = cutaway.load(folder)
    with pytest.warns(UserWarning, match="are cut to the checkpoint's 20 tokens"):
        ours = model.embed(TEXTS)
    assert (ours - torch.from_numpy(np.asarray(theirs))).abs().max() <= 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A call's own words count.
        other = model.embed(TEXTS, pool="mean", normalize=not normalize)
        lengths = other.norm(dim=-1)
    assert bool((lengths - 1).abs().max() < 1e-5) is not normalize


def test_a_vector_is_its_texts_alone(tmp_path: Path) -> None:
    """Case M06."""
    model = cutaway.load(write(tmp_path / "bert", "BertModel"))
    short, long = "a cat", " ".join(["the parcel is late"] * 14)
    for pool in ("mean", "cls", "last"):
        together = model.embed([short, long, short], pool=pool)
        assert (together[0] - model.embed(short, pool=pool)[0]).abs().max() <= 1e-5
        assert torch.equal(together[0], together[2])
    assert model.embed([]).shape == (0, 32)
    assert torch.isfinite(model.embed("")).all()


def test_refusals(tmp_path: Path) -> None:
    model = cutaway.load(write(tmp_path / "bert", "BertModel"))
    with pytest.raises(RequestError, match="unknown pooling"):
        model.embed("a", pool="median")
    with pytest.raises(RequestError, match="no such prompt"):
        model.embed("a", prompt="query")
    with pytest.raises(RequestError, match="texts/1"):
        model.embed(["a", 3])  # type: ignore[list-item]
    with pytest.raises(cutaway.CutawayError, match="at most 64 tokens"):
        model.embed("cat " * 80)


@pytest.mark.parametrize(
    ("file", "values", "error", "says"),
    [
        ("modules.json", {}, ConfigError, "not a list of steps"),
        ("modules.json", [{"type": "x.Transformer"}, {"type": "x.Dense"}], UnsupportedModelError, "Dense"),
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, ConfigError, "this pooling"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, ConfigError, "this pooling"),
        ("1_Pooling/config.json", [], ConfigError, "not an object"),
        ("sentence_bert_config.json", {"max_seq_length": -3}, ConfigError, "not a whole number"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, ConfigError, "is no prompt"),
    ],
)
def test_bad_files(tmp_path: Path, file: str, values: Any, error: type[Exception], says: str) -> None:
    settings = SentenceSettings("mean", True, 20, prompts=(("query", "q: "),))
    for name, data in sentence_files(settings, 32).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(error, match=says):
        read_sentence(tmp_path)
