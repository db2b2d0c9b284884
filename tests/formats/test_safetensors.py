"""safetensors: rows S1–S22, cases C03 and C12, T12, D9, F17–F19."""

from __future__ import annotations

import json
import os
import stat
import struct
import time
import tracemalloc
import warnings
from math import prod
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from cutaway.errors import (
    CutawayError,
    DtypeError,
    FormatError,
    LimitExceeded,
    RequestError,
    ShapeMismatch,
    StorageError,
    TruncatedError,
    UnsafeFormatError,
)
from cutaway.formats import safetensors as ours
from cutaway.formats.safetensors import DTYPES, SafetensorsFile, save_safetensors


def packed(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.safetensors"


def refused(path: Path, data: bytes, error: type[CutawayError], *words: str) -> CutawayError:
    """Opening ``data`` raises just this error, and its message has the path and the words."""
    path.write_bytes(data)
    with pytest.raises(error) as caught:
        SafetensorsFile(path).close()
    assert type(caught.value) is error
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


GOOD = {"w": entry("F32", (2, 2), 0, 16), "b": entry("I8", (3,), 16, 19), "__metadata__": {"format": "pt"}}
GOOD_DATA = struct.pack("<4f3b", 1, 2, 3, 4, -1, 0, 1)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_good_file(path: Path, mmap: bool) -> None:
    path.write_bytes(packed(GOOD, GOOD_DATA))
    with SafetensorsFile(path, mmap=mmap) as file:
        assert file.names() == ["w", "b"]
        assert file.metadata == {"format": "pt"}
        info = file.info("w")
        assert (info.name, info.dtype, info.shape, info.nbytes) == ("w", torch.float32, (2, 2), 16)
        assert path.read_bytes()[info.offset : info.offset + 4] == struct.pack("<f", 1)
        seen: list[int] = []
        assert file.read("w", progress=seen.append).tolist() == [[1, 2], [3, 4]]
        assert sum(seen) == 16
        assert file.read("b").tolist() == [-1, 0, 1]
        with pytest.raises(ShapeMismatch, match="x: tensor is missing"):
            file.read("x")


def test_every_type_reads_as_the_library_reads_it(path: Path) -> None:
    rng = np.random.default_rng(0)
    raw = torch.from_numpy(rng.integers(0, 256, 48, dtype=np.uint8))
    tensors = {
        name: (raw & 1 if dtype is torch.bool else raw.clone()).view(dtype).reshape(2, -1)
        for name, dtype in DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 3)}
    safetensors.torch.save_file(tensors, path)
    with SafetensorsFile(path) as file:
        assert set(file.names()) == set(tensors)
        for name, tensor in tensors.items():
            got = file.read(name)
            assert got.dtype is tensor.dtype
            assert got.shape == tensor.shape
            assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


# -- the table -------------------------------------------------------------------------------


def test_s1_too_short_for_a_length(path: Path) -> None:
    refused(path, b"", TruncatedError, "header_len")
    refused(path, b"\1\0\0\0\0\0\0", TruncatedError, "header_len")


def test_s2_impossible_header_lengths(path: Path) -> None:
    refused(path, packed(b"{}", length=1 << 63), LimitExceeded, "header_len")
    refused(path, packed(b"{}", length=100_000_001), LimitExceeded, "header_len", "100000000")
    refused(path, packed(b"{}", length=100_000_000), TruncatedError, "header_len")
    refused(path, packed(b"{}", length=3), TruncatedError, "11 bytes", "got 10")


def test_s3_headers_that_are_no_json_object(path: Path) -> None:
    assert refused(path, packed(b'{"\xff":1}'), FormatError, "UTF-8").offset == 10
    assert refused(path, packed(b'{"a":}'), FormatError, "JSON").offset == 13
    assert refused(path, packed(b"[]"), FormatError).offset == 8
    assert refused(path, packed(b""), FormatError).offset == 8
    assert refused(path, packed(b'{"a":NaN}'), FormatError, "NaN").offset == 13


def test_s4_a_space_before_the_brace(path: Path) -> None:
    refused(path, packed(b" {}"), FormatError, "{")
    path.write_bytes(packed(b"{}   "))  # after it, padding is allowed
    with SafetensorsFile(path) as file:
        assert file.names() == []


def test_s5_s6_a_name_twice(path: Path) -> None:
    one = json.dumps(entry())
    other = json.dumps(entry("I32"))
    later = json.dumps(entry(begin=8, end=16))
    refused(path, packed(f'{{"w":{one},"w":{other}}}'.encode(), bytes(8)), FormatError, "twice", "/w")
    refused(path, packed(f'{{"w":{one},"w":{later}}}'.encode(), bytes(16)), FormatError, "twice", "/w")


def test_s7_c03_bytes_that_do_not_add_up(path: Path) -> None:
    two = {"a": entry(), "b": entry(begin=8, end=16)}
    refused(path, packed({"a": entry(), "b": entry(begin=12, end=20)}, bytes(20)), FormatError, "b:", "hole")
    refused(path, packed({"a": entry(begin=4, end=12)}, bytes(12)), FormatError, "a:", "hole")
    refused(path, packed({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)), FormatError, "b:", "overlaps")
    refused(path, packed({"a": entry(), "b": entry()}, bytes(8)), FormatError, "b:", "overlaps")
    size = len(packed(two, bytes(16)))
    refused(path, packed(two, bytes(26)), FormatError, f"expected {size} bytes", f"got {size + 10}")
    refused(path, packed(two, bytes(15)), TruncatedError, "b:", str(size), str(size - 1))
    refused(path, packed(two, bytes(4)), TruncatedError, "a:")
    refused(path, packed(two), TruncatedError, "a:")


def test_s8_types(path: Path) -> None:
    refused(path, packed({"w": entry("F33")}, bytes(8)), DtypeError, "w:", "F33")
    refused(path, packed({"w": entry("F4", (3,), 0, 2)}, bytes(2)), DtypeError, "w:", "F4")
    refused(path, packed({"w": {**entry(), "dtype": 7}}, bytes(8)), DtypeError, "w:")
    refused(path, packed({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), DtypeError, "w:")


def test_s9_shapes(path: Path) -> None:
    for shape in [(-1,), (-1, -2), (1 << 63, 2), (1 << 62, 4, 0), (3,), (2, 2), ()]:
        refused(path, packed({"w": entry(shape=shape)}, bytes(8)), ShapeMismatch, "w:")
    for shape in [(2.0,), ("2",), (True, 2), (None,)]:
        refused(path, packed({"w": entry(shape=shape)}, bytes(8)), FormatError, "w:")
    refused(path, packed({"w": {**entry(), "shape": 2}}, bytes(8)), FormatError, "w:")
    for span in [(8, 0), (-8, 0), (0.0, 8), (0, None), (0, 1 << 70)]:
        error = ShapeMismatch if span[1] == 1 << 70 else FormatError
        refused(path, packed({"w": entry(begin=span[0], end=span[1])}, bytes(8)), error, "w:")
    refused(path, packed({"w": {**entry(), "data_offsets": [0]}}, bytes(8)), FormatError, "w:")
    refused(path, packed({"w": [1]}, bytes(8)), FormatError, "w:")


def test_s10_a_huge_empty_tensor_is_seen_in_its_shape(path: Path) -> None:
    # The format allows it; whoever expects another shape compares `info`, before any allocation.
    path.write_bytes(packed({"w": entry(shape=(0, 1 << 40), end=0)}))
    with SafetensorsFile(path) as file:
        assert file.info("w").shape == (0, 1 << 40)
        assert file.read("w").shape == (0, 1 << 40)


def test_s11_rank(path: Path) -> None:
    refused(path, packed({"w": entry(shape=[1] * 70 + [2])}, bytes(8)), LimitExceeded, "w:", "71")
    path.write_bytes(packed({"w": entry(shape=[1] * 7 + [2])}, bytes(8)))
    with SafetensorsFile(path) as file:
        assert file.read("w").dim() == 8


def test_s12_metadata(path: Path) -> None:
    refused(path, packed({"__metadata__": {"a": 1}}), FormatError, "/__metadata__/a")
    refused(path, packed({"__metadata__": [1]}), FormatError, "/__metadata__")


def test_s13_unknown_fields_warn(path: Path) -> None:
    path.write_bytes(packed({"w": entry(colour="red")}, bytes(8)))
    with pytest.warns(UserWarning, match=r"w: unknown fields \['colour'\]"):
        SafetensorsFile(path).close()


def test_s14_names(path: Path) -> None:
    for name in ["", "a\0b", "a\nb", "\u202eabc", "n" * 513, "n" * 1_000_000]:
        refused(path, packed({name: entry()}, bytes(8)), FormatError, "name")
    for name in ["../../etc/x", "n" * 512, "ключ"]:  # odd, but text, and never a path
        path.write_bytes(packed({name: entry()}, bytes(8)))
        with SafetensorsFile(path) as file:
            assert file.read(name).tolist() == [0, 0]
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("mmap", [False, True])
def test_s15_booleans(path: Path, mmap: bool) -> None:
    path.write_bytes(packed({"ok": entry("BOOL", (2,), 0, 2), "bad": entry("BOOL", (2,), 2, 4)}, b"\0\1\1\7"))
    with SafetensorsFile(path, mmap=mmap) as file:
        assert file.read("ok").tolist() == [False, True]
        with pytest.raises(FormatError, match=r"bad: .*boolean"):
            file.read("bad")


def test_s16_nonfinite_weights_load_and_are_counted(path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    tensors = {
        "f": torch.tensor([1.0, nan, inf, -inf]),
        "h": torch.tensor([[nan, 1.0]], dtype=torch.bfloat16),
        "e": torch.tensor([nan, 1.0]).to(torch.float8_e4m3fn),
        "c": torch.tensor([complex(0, nan), 1]),
        "fine": torch.ones(3),
        "ints": torch.ones(3, dtype=torch.int64),
    }
    save_safetensors(path, tensors)
    with SafetensorsFile(path) as file:
        assert file.read("f").isnan().sum() == 1
        assert file.count_nonfinite() == {"f": 3, "h": 1, "e": 1, "c": 1}


def test_s17_t11_bombs_are_refused_in_little_memory_and_time(path: Path) -> None:
    item = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    many = b"{" + b",".join(item % i for i in range(1_100_000)) + b"}"
    braces = b'{"a":"' + b"{" * 1_100_000 + b'"}'
    # What would unfold to many times its size: empty lists, numbers, objects, wide characters.
    lists = b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"
    numbers = b'{"a":{"dtype":"F32","shape":[' + b"1000," * 5_000_000 + b"0]}}"
    wide = b'{"__metadata__":{"a":"\xf0\x9f\x98\x80' + b"a" * 40_000_000 + b'"}}'
    for header in (many, braces, lists, numbers, wide):
        path.write_bytes(packed(header))
        start = time.monotonic()
        tracemalloc.start()
        with pytest.raises(LimitExceeded):
            SafetensorsFile(path).close()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2.2 * len(header) + (1 << 20)  # the header, read into memory, and nothing unfolded
        assert time.monotonic() - start < 10  # a hang, not a speed


def test_s18_deep_json(path: Path) -> None:
    refused(path, packed(b'{"a":' + b"[" * 100_000), FormatError, "deep")


def test_s19_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in (".", "fifo"):
        with pytest.raises(FormatError):
            SafetensorsFile(tmp_path / name)
    with pytest.raises(StorageError):
        SafetensorsFile(tmp_path / "dangling")


def test_s20_every_prefix_is_truncated(path: Path) -> None:
    whole = packed(GOOD, GOOD_DATA)
    for size in range(len(whole)):
        refused(path, whole[:size], TruncatedError)


def test_g22_for_safetensors_every_flipped_byte_is_an_error_or_a_file(path: Path) -> None:
    whole = packed(GOOD, GOOD_DATA)
    opened = 0
    for i in range(len(whole) - len(GOOD_DATA)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ mask]) + whole[i + 1 :])
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # unknown fields
                    with SafetensorsFile(path) as file:
                        for name in file.names():
                            file.read(name)
                opened += 1
            except CutawayError:
                continue
    assert opened  # a changed letter in a name


@pytest.mark.parametrize("change", ["truncate", "overwrite", "remove"])
def test_s21_t12_what_happens_to_the_file_later_reaches_no_tensor(path: Path, change: str) -> None:
    save_safetensors(path, {"w": torch.arange(100_000)})
    with SafetensorsFile(path) as file:
        tensor = file.read("w")
        if change == "truncate":
            os.truncate(path, 0)
        elif change == "overwrite":
            path.write_bytes(bytes(path.stat().st_size))
        else:
            path.unlink()
        assert torch.equal(tensor, torch.arange(100_000))
        if change == "truncate":
            with pytest.raises(TruncatedError, match="w: "):
                file.read("w")


def test_s22_other_files(path: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, path)
    refused(path, path.read_bytes(), UnsafeFormatError)
    refused(path, b"\x80\x02}q\0.", UnsafeFormatError)
    lfs = refused(path, b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", FormatError, "LFS")
    assert lfs.hint == "git lfs pull"
    refused(path, b"GGUF" + bytes(20), FormatError, "gguf")
    refused(path, b"<!doctype html><html></html>", FormatError, "web page")
    (tmp_path / "pytorch_model.bin").write_bytes(packed(GOOD, GOOD_DATA))  # the name says nothing
    with SafetensorsFile(tmp_path / "pytorch_model.bin") as file:
        assert file.names() == ["w", "b"]


def test_a_reader_that_fails_leaves_no_file_open(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(5):
        refused(path, packed(GOOD), TruncatedError)
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before


# -- saving ----------------------------------------------------------------------------------

_SHAPES = st.lists(st.integers(0, 4), max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), _SHAPES, st.integers(0, 99)), max_size=4))
def test_d9_what_is_saved_is_what_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, list[int], int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "d9.safetensors"
    tensors = {}
    for i, (dtype, shape, seed) in enumerate(parts):
        high = 2 if dtype == "BOOL" else 256
        n = prod(shape) * DTYPES[dtype].itemsize
        raw = torch.randint(high, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        tensors[f"{i}.é"] = raw.view(DTYPES[dtype]).reshape(shape)
    save_safetensors(path, tensors, {"a": "ü"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"a": "ü"}
        assert sorted(file.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert file.info(name).shape == tuple(tensor.shape)
            if tensor.numel():
                got = file.read(name)
                assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert set(safetensors.torch.load_file(path)) == set(tensors)


def test_views_and_shared_memory_are_saved_each_by_itself(path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    tensors = {
        "base": base,
        "tied": base,
        "turned": base.T,
        "row": base[1],
        "overlap": base[1:],
        "wide": torch.ones(1).expand(5),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "none": base[:0],
    }
    save_safetensors(path, tensors)
    with SafetensorsFile(path) as file:
        for name, tensor in tensors.items():
            assert torch.equal(file.read(name), tensor.detach().resolve_conj().resolve_neg()), name


@pytest.mark.parametrize("mmap", [False, True])
def test_c12_f18_saving_onto_the_file_just_loaded(path: Path, mmap: bool) -> None:
    save_safetensors(path, {"a": torch.ones(1000), "b": torch.zeros(1000)})
    with SafetensorsFile(path, mmap=mmap) as file:
        tensors = {name: file.read(name) for name in file.names()}
        changed = {**tensors, "a": tensors["a"] * 2}
        save_safetensors(path, changed)
        assert torch.equal(tensors["a"], torch.ones(1000))  # the old tensors stay valid
        assert torch.equal(tensors["b"], torch.zeros(1000))
    with SafetensorsFile(path) as file:
        assert torch.equal(file.read("a"), torch.full((1000,), 2.0))
        assert torch.equal(file.read("b"), torch.zeros(1000))
    assert os.listdir(path.parent) == [path.name]


def test_a_mapped_tensor_may_be_written_to_and_the_file_stays(path: Path) -> None:
    save_safetensors(path, {"a": torch.ones(10)})
    before = path.read_bytes()
    with SafetensorsFile(path, mmap=True) as file:
        file.read("a").zero_()
    assert path.read_bytes() == before


def test_a_misaligned_tensor_is_copied_out_of_the_mapping(path: Path) -> None:
    header = {"b": entry("U8", (1,), 0, 1), "w": entry("F32", (2,), 1, 9)}
    path.write_bytes(packed(header, b"\1" + struct.pack("<2f", 5, 6)))
    with SafetensorsFile(path, mmap=True) as file:
        assert file.read("w").tolist() == [5, 6]


def test_t29_the_umask_decides_the_mode(path: Path) -> None:
    old = os.umask(0o022)
    try:
        save_safetensors(path, {"a": torch.ones(1)})
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_what_the_format_cannot_hold_is_refused_before_writing(path: Path) -> None:
    bad: dict[str, Any] = {
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "rank": torch.ones([1] * 9),
        "c": torch.zeros(1, dtype=torch.complex128),
        "list": [1.0],
        "n" * 513: torch.ones(1),
        "a\0": torch.ones(1),
        "": torch.ones(1),
        "__metadata__": torch.ones(1),
    }
    for name, tensor in bad.items():
        with pytest.raises(RequestError) as caught:
            save_safetensors(path, {"fine": torch.ones(1), name: tensor})
        assert caught.value.field is not None
        assert name[:20].rstrip("\0") in caught.value.field
    with pytest.raises(RequestError, match="metadata"):
        save_safetensors(path, {}, {"a": 1})  # type: ignore[dict-item]
    assert os.listdir(path.parent) == []


def test_f17_f19_faults_leave_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_safetensors(path, {"a": torch.ones(4)})
    before = path.read_bytes()
    real = safetensors.torch.save_file

    def flipped(tensors: dict[str, torch.Tensor], name: str, metadata: object = None) -> None:
        real(tensors, name)
        with open(name, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")

    def full(*args: object, **kwargs: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device")

    for fault, words in ((flipped, "a: what was written reads back differently"), (full, "No space left")):
        monkeypatch.setattr(ours.safetensors.torch, "save_file", fault)
        with pytest.raises(StorageError, match=words):
            save_safetensors(path, {"a": torch.zeros(4)})
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [path.name]


def test_saving_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        save_safetensors(tmp_path / "none" / "m.safetensors", {"a": torch.ones(1)})
