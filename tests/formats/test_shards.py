"""Folders of shards: rows H10, H11, H12, H18, H20, T28."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from cutaway.errors import (
    CutawayError,
    FormatError,
    LimitExceeded,
    RequestError,
    ShapeMismatch,
    ShardError,
    StorageError,
    TruncatedError,
    UnsafeFormatError,
)
from cutaway.formats import shards
from cutaway.formats.shards import ShardedSafetensors, save_sharded

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def folder_with(folder: Path, files: dict[str, dict[str, torch.Tensor]], **index: Any) -> Path:
    """A folder of shards and their index, whose parts ``index`` replaces."""
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, folder / name)
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    placed = {tensor: name for name, tensors in files.items() for tensor in tensors}
    whole = {"metadata": {"total_size": size}, "weight_map": placed, **index}
    (folder / shards.INDEX).write_text(json.dumps(whole))
    return folder


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return folder_with(tmp_path / "m", {ONE: {"a": torch.ones(2), "b": torch.zeros(3)}, TWO: {"c": torch.ones(4)}})


def refused(folder: Path, error: type[CutawayError], field: str | None, *words: str) -> CutawayError:
    with pytest.raises(error) as caught:
        ShardedSafetensors(folder).close()
    assert type(caught.value) is error
    assert caught.value.field == field
    for word in (folder.name, *words):
        assert word in str(caught.value)
    return caught.value


@pytest.mark.parametrize("mmap", [False, True])
def test_shards_read_like_one_file(good: Path, mmap: bool) -> None:
    with ShardedSafetensors(good, mmap=mmap) as file:
        assert file.names() == ["a", "b", "c"]
        assert file.info("c").shape == (4,)
        seen: list[int] = []
        assert file.read("c", progress=seen.append).tolist() == [1, 1, 1, 1]
        assert sum(seen) == 16
        assert file.count_nonfinite() == {}
        with pytest.raises(ShapeMismatch, match="x: tensor is missing"):
            file.info("x")


def test_a_single_file_needs_no_index_and_wins_over_one(good: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"z": torch.ones(1)}, good / shards.SINGLE, {"k": "v"})
    with pytest.warns(UserWarning, match="index"):
        file = ShardedSafetensors(good)
    with file:
        assert file.names() == ["z"]
        assert file.metadata == {"k": "v"}


def test_h10_only_pickles(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    error = refused(tmp_path, UnsafeFormatError, None, "pytorch_model.bin")
    assert "convert" in str(error.hint)


def test_folders_without_weights(tmp_path: Path) -> None:
    refused(tmp_path, ShardError, None, "no weights")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", FormatError, None)
    refused(tmp_path / "none", StorageError, None)


def test_h11_a_shard_is_missing(good: Path) -> None:
    (good / TWO).unlink()
    refused(good, ShardError, "/weight_map/c", TWO)
    (good / TWO).symlink_to("nowhere.safetensors")
    refused(good, ShardError, "/weight_map/c", TWO)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "..\\x", "", "a\0", "..", "C:\\x"])
def test_h11_t28_paths_that_lead_out(good: Path, name: str) -> None:
    (good.parent / "x").write_bytes((good / TWO).read_bytes())
    folder_with(good, {}, weight_map={"a": ONE, "b": ONE, "c/d": name})
    refused(good, ShardError, "/weight_map/c~1d", "name")


@pytest.mark.parametrize("name", [TWO, shards.INDEX])
def test_h11_links_out_of_the_folder(good: Path, name: str) -> None:
    (good / name).rename(good.parent / "elsewhere")
    (good / name).symlink_to("../elsewhere")
    refused(good, ShardError, "/weight_map/c" if name == TWO else None, "links out")


def test_a_hub_snapshot_of_links_is_read(good: Path, tmp_path: Path) -> None:
    repo = tmp_path / "models--who--what"
    snapshot = repo / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for i, name in enumerate(os.listdir(good)):
        (good / name).rename(repo / "blobs" / f"hash{i}")
        (snapshot / name).symlink_to(f"../../blobs/hash{i}")
    with ShardedSafetensors(snapshot) as file:
        assert file.names() == ["a", "b", "c"]
    (snapshot / TWO).unlink()
    (tmp_path / "outside").touch()
    (snapshot / TWO).symlink_to("../../../outside")
    refused(snapshot, ShardError, "/weight_map/c", "links out")


def test_h11_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", {ONE: {"a": torch.ones(2)}, TWO: {"a": torch.ones(2), "c": torch.ones(1)}})
    folder_with(folder, {}, weight_map={"a": ONE, "c": TWO})
    refused(folder, ShardError, "a", ONE, TWO)


def test_h11_a_tensor_that_is_listed_but_absent(good: Path) -> None:
    folder_with(good, {}, weight_map={"a": ONE, "b": ONE, "c": TWO, "d": TWO})
    refused(good, ShardError, "/weight_map/d", TWO)
    folder_with(good, {}, weight_map={"a": ONE, "b": TWO, "c": TWO})  # there, but elsewhere
    refused(good, ShardError, "/weight_map/b", TWO)


@pytest.mark.parametrize("placed", [None, [], {}, "x", {"a": 1}, {"a": None}])
def test_h11_an_index_that_is_no_index(good: Path, placed: Any) -> None:
    folder_with(good, {}, weight_map=placed)
    refused(good, ShardError, "/weight_map/a" if placed in ({"a": 1}, {"a": None}) else "/weight_map")


def test_h11_an_index_that_is_no_json(good: Path) -> None:
    for text, field in [("", None), ("[]", "/weight_map"), ('{"weight_map":{"a":"x","a":"y"}}', "/weight_map/a")]:
        (good / shards.INDEX).write_text(text)
        refused(good, ShardError, field, shards.INDEX)


def test_h11_a_wrong_total_is_a_warning(good: Path) -> None:
    for total in (5, "x", [1]):
        folder_with(good, {}, metadata={"total_size": total}, weight_map={"a": ONE, "b": ONE, "c": TWO})
        with pytest.warns(UserWarning, match="/metadata/total_size .* 36 bytes"):
            ShardedSafetensors(good).close()
    for metadata in ({}, None, 3):  # but none at all is no claim
        folder_with(good, {}, metadata=metadata, weight_map={"a": ONE, "b": ONE, "c": TWO})
        ShardedSafetensors(good).close()


def test_h12_what_the_index_does_not_know_is_a_warning(good: Path) -> None:
    safetensors.torch.save_file({"z": torch.ones(1)}, good / "consolidated.safetensors")
    with pytest.warns(UserWarning, match=r"consolidated\.safetensors"), ShardedSafetensors(good) as file:
        assert "z" not in file.names()
    (good / "consolidated.safetensors").unlink()
    folder_with(good, {}, metadata={}, weight_map={"a": ONE, "c": TWO})
    with pytest.warns(UserWarning, match="in a shard but not in the index"), ShardedSafetensors(good) as file:
        assert "b" in file.names()


def test_h18_names_that_differ_in_case(good: Path) -> None:
    (good / "Model.safetensors.Index.json").touch()
    refused(good, ShardError, None, "ambiguous", "Model.safetensors.Index.json")
    (good / "Model.safetensors.Index.json").unlink()
    folder_with(good, {}, weight_map={"a": ONE, "b": ONE, "c": TWO, "d": ONE.upper()})
    refused(good, ShardError, "/weight_map", "case")


def test_h20_a_folder_of_very_many_files(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_LISTED", 5)
    for i in range(4):
        (good / str(i)).touch()
    refused(good, LimitExceeded, None, "5")
    monkeypatch.setattr(shards, "MAX_LISTED", 50)
    monkeypatch.setattr(shards, "MAX_SHARDS", 1)
    refused(good, LimitExceeded, None, "shards")


def test_c03_a_shard_that_was_cut(good: Path) -> None:
    size = (good / TWO).stat().st_size
    os.truncate(good / TWO, size - 1)
    with pytest.raises(TruncatedError, match=f"{TWO}: c: .*expected {size} .*got {size - 1}"):
        ShardedSafetensors(good)


def test_no_file_stays_open_after_an_error(good: Path) -> None:
    os.truncate(good / TWO, 20)
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    for _ in range(5):
        with pytest.raises(TruncatedError):
            ShardedSafetensors(good)
    assert len(os.listdir("/proc/self/fd") if before else []) == len(before)


# -- saving ----------------------------------------------------------------------------------

TENSORS = {f"layer.{i}": torch.full((10,), float(i)) for i in range(5)}


def test_save_and_read_back_in_shards(tmp_path: Path) -> None:
    names = save_sharded(tmp_path, TENSORS, max_shard_bytes=80, metadata={"format": "pt", "k": "v"})
    assert names == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), shards.INDEX]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    index = json.loads((tmp_path / shards.INDEX).read_text())
    assert index["metadata"]["total_size"] == 200
    assert list(index["weight_map"]) == list(TENSORS)
    with ShardedSafetensors(tmp_path) as file:
        assert file.metadata == {"format": "pt", "k": "v"}
        for name, tensor in TENSORS.items():
            assert torch.equal(file.read(name), tensor)


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    save_sharded(tmp_path, {"a": torch.ones(1), "big": torch.ones(100), "c": torch.ones(1)}, max_shard_bytes=8)
    placed = json.loads((tmp_path / shards.INDEX).read_text())["weight_map"]
    assert len(set(placed.values())) == 3


def test_a_second_save_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "adapter.safetensors").touch()
    others = {"config.json", "adapter.safetensors"}
    for size in (80, 1000, 40, 80):
        names = save_sharded(tmp_path, TENSORS, max_shard_bytes=size)
        assert {*os.listdir(tmp_path)} == {*names} | others


def test_saving_onto_what_is_being_read(tmp_path: Path) -> None:
    save_sharded(tmp_path, TENSORS, max_shard_bytes=80)
    with ShardedSafetensors(tmp_path, mmap=True) as file:
        tensors = {name: file.read(name) for name in file.names()}
        save_sharded(tmp_path, {**tensors, "layer.0": tensors["layer.0"] + 7}, max_shard_bytes=80)
        assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    with ShardedSafetensors(tmp_path) as file:
        assert file.read("layer.0")[0] == 7


def test_a_fault_in_any_shard_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sharded(tmp_path, TENSORS, max_shard_bytes=80)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    real = safetensors.torch.save_file
    for when in range(3):
        calls = iter(range(9))

        def failing(*args: Any, when: int = when, calls: Any = calls, **kwargs: Any) -> None:
            if next(calls) == when:
                raise safetensors.SafetensorError("No space left on device")
            real(*args, **kwargs)

        monkeypatch.setattr(safetensors.torch, "save_file", failing)
        with pytest.raises(StorageError, match="No space left"):
            save_sharded(tmp_path, {name: tensor + 1 for name, tensor in TENSORS.items()}, max_shard_bytes=80)
        assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="max_shard_bytes"):
        save_sharded(tmp_path, TENSORS, max_shard_bytes=0)
    with pytest.raises(RequestError, match="s: "):
        save_sharded(tmp_path, {"s": torch.eye(2).to_sparse()})
    with pytest.raises(StorageError):
        save_sharded(tmp_path / "none", TENSORS)
    assert os.listdir(tmp_path) == []
