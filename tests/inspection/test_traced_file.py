"""A trace as one file: back bit by bit, without the model, and nothing that is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import cutaway
from cutaway.errors import CutawayError, FormatError, NameNotFound, RequestError, StorageError
from cutaway.formats.safetensors import save_safetensors
from cutaway.inspection import Trace, trace
from cutaway.spec.names import axis_sizes
from tests.reference import tiny, tiny_encoders, tiny_seq2seq
from tests.tokenizers.small import chatml


def whole(name: str = "llama", more: int = 2) -> Trace:
    return trace(tiny.transformer(name), [[5, 6, 7], [8]], ("*.attn.*", "logits"), max_tokens=more)


def same(one: Trace, two: Trace) -> None:
    assert list(one) == list(two)
    assert one.axes == two.axes
    assert (one.tokens, one.sources, one.pieces, one.source_pieces) == (
        two.tokens,
        two.sources,
        two.pieces,
        two.source_pieces,
    )
    assert replace(one.spec, kept=()) == replace(two.spec, kept=())
    assert torch.equal(one.positions, two.positions)
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype
        assert torch.equal(tensor.view(torch.uint8), two[name].view(torch.uint8)), name  # NaN too


def test_there_and_back(tmp_path: Path) -> None:
    found = whole()
    path = tmp_path / "some.cut"
    found.save(path)
    same(Trace.open(path), found)
    assert [*tmp_path.iterdir()] == [path]
    back = Trace.open(str(path))
    assert back["*.1.attn.z"].shape == (2, 5, 4, 8)
    assert back.row(1)["logits"].shape == (1, 3, 64)
    with pytest.raises(NameNotFound, match="not kept"):
        back["embed.out"]
    back.row(1).save(path)  # over the old one, and of a part
    same(Trace.open(path), found.row(1))


def test_it_is_safetensors_with_words(tmp_path: Path) -> None:
    """Any reader of the format has the tensors; what they mean is JSON."""
    found = whole()
    found.save(tmp_path / "a.cut")
    with safe_open(tmp_path / "a.cut", "pt") as file:
        metadata = file.metadata()
        assert {*file.keys()} == {*found}
        assert torch.equal(file.get_tensor("logits")[0], found["logits"][0])
    assert (metadata["format"], metadata["version"]) == ("cutaway trace", "1")
    assert json.loads(metadata["tokens"]) == found.tokens
    assert json.loads(metadata["pieces"]) is None
    axes = json.loads(metadata["axes"])
    assert axes["decoder.layers.0.attn.z"] == ["batch", "query", "head", "d_head"]
    assert json.loads(metadata["spec"])["family"] == "llama"


def test_sources_and_pieces(tmp_path: Path) -> None:
    model = cutaway.Model(tiny_seq2seq.transformer("t5"))
    found = model.trace([[5, 6, 7], [8]], "*.weights", "encoder.norm.out", target=[[2, 3], [4]])
    found.save(tmp_path / "a.cut")
    same(Trace.open(tmp_path / "a.cut"), found)
    assert found.source_lengths == [3, 1]

    words = chatml(tmp_path / "words")
    llama = cutaway.build({"d_model": 16, "n_heads": 2, "layers": 1, "vocab_size": 600}, tokenizer=words)
    found = llama.trace(["a bé", "c"], "embed.out", max_tokens=1)
    assert found.pieces is not None
    assert [len(row) for row in found.pieces] == found.lengths
    assert "".join(found.pieces[1][:-1]).endswith("c")
    found.save(tmp_path / "b.cut")
    same(Trace.open(tmp_path / "b.cut"), found)


def test_half_types_and_gradients(tmp_path: Path) -> None:
    model = tiny.transformer("llama")
    found = trace(model, [[5, 6, 7]], ("logits",), grad=True)
    found.save(tmp_path / "a.cut")
    same(Trace.open(tmp_path / "a.cut"), trace(model, [[5, 6, 7]], ("logits",)))
    model.to(torch.bfloat16)
    found = trace(model, [[5, 6, 7], [4]], ("*",))
    assert found["logits"].dtype is torch.bfloat16
    found.save(tmp_path / "a.cut")
    same(Trace.open(tmp_path / "a.cut"), found)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, -1])
def test_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.cut"
    whole().save(path)
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(FormatError) as caught:
        Trace.open(path)
    assert caught.value.path == str(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(FormatError):
        Trace.open(path)


def test_every_byte_counts(tmp_path: Path) -> None:
    """One bit, anywhere, is an error of ours."""
    path = tmp_path / "a.cut"
    trace(tiny.transformer("llama"), [[5, 6]], ("*.0.attn.z",)).save(path)
    data = path.read_bytes()
    for place in [*range(0, len(data), 97), len(data) - 1]:
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(CutawayError):
            Trace.open(path)


def other(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """The file with other words and their right hash: what only a hand could write."""

    def write(path: Path) -> None:
        from cutaway.formats.safetensors import SafetensorsFile
        from cutaway.inspection.traced_file import _digest

        with SafetensorsFile(path) as file:
            metadata, tensors = dict(file.metadata), {name: file.read(name) for name in file.names()}
        del metadata["sha256"]
        change(metadata)
        save_safetensors(path, tensors, {**metadata, "sha256": _digest(metadata, tensors)})

    return write


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m.pop("format"), "format"),
        (lambda m: m.update(version="2"), "version"),
        (lambda m: m.pop("tokens"), "tokens"),
        (lambda m: m.update(tokens="[[1, 2"), None),
        (lambda m: m.update(tokens="[]"), "tokens"),
        (lambda m: m.update(tokens="[[5, 6, 7, 8, 9], [true]]"), "tokens"),
        (lambda m: m.update(tokens="[[5, 6, 7]]"), "decoder.layers.0.attn.norm_scale"),
        (lambda m: m.update(pieces='[["a"], ["b"]]'), "pieces"),
        (lambda m: m.update(pieces="3"), "pieces"),
        (lambda m: m.update(sources="[[1]]"), "sources"),
        (lambda m: m.update(sources="[[1], [2]]"), "sources"),  # of a model that has none
        (lambda m: m.update(tokens=m["tokens"].replace("[[5,", "[[-1,")), "tokens"),
        (lambda m: m.update(tokens=m["tokens"].replace("[[5,", "[[64,")), "tokens"),  # past the vocabulary
        (lambda m: m.update(spec=m["spec"].replace('"d_model": 32', '"d_model": 64')), None),
        (lambda m: m.update(source_pieces='[["a"]]'), "source_pieces"),
        (lambda m: m.update(spec="{}"), None),
        (lambda m: m.update(spec=m["spec"].replace('"n_heads": 4', '"n_heads": 4.5')), None),
        (lambda m: m.update(axes='{"logits": ["batch"]}'), "axes"),
    ],
)
def test_words_that_do_not_fit(tmp_path: Path, change: Callable[[dict[str, str]], Any], field: str | None) -> None:
    path = tmp_path / "a.cut"
    whole().save(path)
    other(change)(path)
    with pytest.raises(CutawayError) as caught:
        Trace.open(path)
    assert caught.value.path == str(path)
    assert field is None or caught.value.field == field


def test_sources_that_do_not_fit(tmp_path: Path) -> None:
    found = trace(tiny_seq2seq.transformer("t5"), [[5, 6], [7]], ("*.z",), sources=[[4, 5, 6], [8]])
    path = tmp_path / "a.cut"
    for sources in ("null", "[[4, 5, 64], [8]]", "[[4, -1, 6], [8]]"):
        found.save(path)
        other(lambda m, sources=sources: m.update(sources=sources))(path)  # type: ignore[misc]
        with pytest.raises(FormatError) as caught:
            Trace.open(path)
        assert caught.value.field == "sources"


@pytest.mark.parametrize("case", ["mixtral-window", "gemma2", "gpt2", "bert-labels", "bart"])
def test_sizes_are_the_models(tmp_path: Path, case: str) -> None:
    """Whatever there is of any kind of model fits what its description says; what is narrower does not."""
    source, model = None, None
    if case == "bart":
        source, model = [[4, 5, 6]], tiny_seq2seq.transformer(case)
    else:
        model = tiny.transformer(tiny_encoders.config(case) if case in tiny_encoders.CASES else case)
    found = trace(model, [[5, 6, 7]], ("*",), sources=source)
    path = tmp_path / "a.cut"
    found.save(path)
    same(Trace.open(path), found)
    for name in found:
        fixed = [i for i, word in enumerate(found.axes[name]) if word in axis_sizes(model.spec, name)]
        assert fixed, name
        if found[name].shape[fixed[-1]] > 1:
            Trace({name: found[name].narrow(fixed[-1], 1, 1)}, found._facts).save(path)
            with pytest.raises(FormatError, match="not of these texts"):
                Trace.open(path)


def test_other_files(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "x.cut", {"a": torch.zeros(1)})
    with pytest.raises(FormatError, match="no saved trace"):
        Trace.open(tmp_path / "x.cut")
    (tmp_path / "y.cut").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CutawayError):
        Trace.open(tmp_path / "y.cut")
    with pytest.raises(StorageError):
        Trace.open(tmp_path / "missing.cut")
    with pytest.raises(RequestError):
        Trace.open("")
    with pytest.raises(StorageError):
        whole().save(tmp_path / "no" / "such" / "folder.cut")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.cut"
    whole().save(path)
    before = path.read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StorageError):
        whole(more=3).save(path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]
