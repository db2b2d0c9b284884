"""The GGUF container: rows G1–G12, G14 (structure), G20–G22, cases C03 and C05, T8, T11, T12."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf as oracle
import numpy as np
import pytest
import torch

from cutaway.errors import (
    CutawayError,
    DtypeError,
    FormatError,
    LimitExceeded,
    ShapeMismatch,
    ShardError,
    StorageError,
    TruncatedError,
    UnsafeFormatError,
)
from cutaway.formats import gguf as container
from cutaway.formats.gguf import GgufFile
from cutaway.formats.gguf_split import SplitGguf, open_gguf

from .gguf_bytes import (
    ARR,
    BOOL,
    F32,
    F64,
    I32,
    STR,
    U8,
    U16,
    U32,
    U64,
    array,
    gguf,
    kv,
    small,
    tensor,
    text,
    u32,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def refused(path: Path, data: bytes, error: type[CutawayError], *words: str, exact: bool = True) -> CutawayError:
    """Opening ``data`` raises this error, and its message has the path and the words."""
    path.write_bytes(data)
    with pytest.raises(error) as caught:
        GgufFile(path).close()
    assert not exact or type(caught.value) is error
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


# -- good files ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mmap", [False, True])
def test_a_small_file(path: Path, version: int, mmap: bool) -> None:
    path.write_bytes(small(version=version))
    with GgufFile(path, mmap=mmap) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["x.yes"] is True
        assert file.metadata["x.i64"] == -5
        assert file.metadata["x.words"] == ["a", "", "é"]
        types = {key: file.type_of(key) for key in file.metadata}
        assert types["llama.block_count"] == "u32"
        assert types["x.words"] == "arr[str]"
        assert types["x.scores"] == "arr[f32]"
        assert types["x.flags"] == "arr[bool]"
        assert file.metadata["x.flags"].tolist() == [False, True]  # type: ignore[union-attr]
        assert file.names() == ["a", "b"]
        assert file.info("b").shape == (2, 32)
        assert file.info("b").type.name == "Q4_0"
        assert file.raw("b").shape == (2, 18)
        seen: list[int] = []
        assert file.read("a", progress=seen.append).tolist() == list(range(8))
        assert file.read("b", progress=seen.append)[0, :3].tolist() == [-8, -7, -6]
        assert sum(seen) == 32 + 36
        with pytest.raises(ShapeMismatch, match="c: tensor is missing"):
            file.read("c")
        with pytest.raises(FormatError, match="nothing: metadata is missing"):
            file.type_of("nothing")


def test_every_value_and_tensor_of_the_official_writer(path: Path) -> None:
    rng = np.random.default_rng(0)
    writer = oracle.GGUFWriter(path, "llama")
    numbers = {
        "u8": (writer.add_uint8, 255), "i8": (writer.add_int8, -128), "u16": (writer.add_uint16, 65_535),
        "i16": (writer.add_int16, -5), "u32": (writer.add_uint32, 2**32 - 1), "i32": (writer.add_int32, -(2**31)),
        "u64": (writer.add_uint64, 2**64 - 1), "i64": (writer.add_int64, -(2**63)), "f32": (writer.add_float32, 0.25),
        "f64": (writer.add_float64, 0.1), "bool": (writer.add_bool, True), "str": (writer.add_string, "é\n😀"),
    }  # fmt: skip
    for name, (add, value) in numbers.items():
        add(f"x.{name}", value)
    words = [chr(i % 50_000 + 1) * (i % 7) for i in range(20_000)]
    writer.add_array("x.words", words)
    writer.add_array("x.ints", list(range(-5, 5)))
    writer.add_array("x.floats", [0.5, -0.25])
    writer.add_array("x.bools", [True, False])
    weights = rng.standard_normal((6, 64)).astype(np.float32)
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        kind = oracle.GGMLQuantizationType[name]
        writer.add_tensor(f"t.{name}", oracle.quantize(weights, kind), raw_dtype=kind)
    for made in (np.int8, np.int16, np.int32, np.int64, np.float64):
        writer.add_tensor(f"t.{made.__name__}", (weights * 100).astype(made))
    writer.add_tensor("t.4d", weights.reshape(2, 3, 2, 32))
    writer.add_tensor("t.1d", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GgufFile(path) as file:
        for name, (_, value) in numbers.items():
            assert file.metadata[f"x.{name}"] == value
            assert file.type_of(f"x.{name}") == name
        assert file.metadata["x.words"] == words
        for key, kind, values in (
            ("x.ints", "arr[i32]", list(range(-5, 5))),
            ("x.floats", "arr[f32]", [0.5, -0.25]),
            ("x.bools", "arr[bool]", [True, False]),
        ):
            assert file.type_of(key) == kind
            assert list(file.metadata[key]) == values  # type: ignore[arg-type]
        reader = oracle.GGUFReader(path)
        assert file.names() == [one.name for one in reader.tensors]
        for one in reader.tensors:
            shape = tuple(int(n) for n in reversed(one.shape))
            assert file.info(one.name).shape == shape
            assert file.raw(one.name).tobytes() == one.data.tobytes()
            if one.tensor_type.name in ("I8", "I16", "I32", "I64", "F64"):
                want = one.data.astype(np.float32)
            else:
                want = oracle.dequantize(one.data, one.tensor_type)
            assert np.array_equal(file.read(one.name).numpy(), want.reshape(shape))
            half = file.read(one.name, torch.bfloat16)
            assert torch.equal(half, torch.from_numpy(want.reshape(shape).copy()).bfloat16()) or "F64" in one.name


def test_d9_plain_types_come_back_bit_for_bit(path: Path) -> None:
    kinds = {
        0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64,
        24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64,
    }  # fmt: skip
    for number, dtype in kinds.items():
        data = np.random.default_rng(number).integers(0, 256, 64, dtype=np.uint8).tobytes()
        path.write_bytes(gguf([], [tensor("w", [64 // dtype.itemsize], number)], data))
        for mmap in (False, True):
            with GgufFile(path, mmap=mmap) as file:
                assert file.read("w", dtype).dtype is dtype
                assert file.read("w", dtype).view(torch.uint8).numpy().tobytes() == data
    with GgufFile(path) as file:  # 64-bit integers do not pass through float32
        assert torch.equal(file.read("w", torch.float64), file.read("w", torch.int64).double())


def test_large_tensors_are_read_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (64, 9 * 144), dtype=np.uint8)
    path.write_bytes(gguf([], [tensor("w", [9 * 256, 64], 12)], raw.tobytes()))
    with np.errstate(all="ignore"):
        want = torch.from_numpy(oracle.dequantize(raw, oracle.GGMLQuantizationType.Q4_K))
    monkeypatch.setattr("cutaway.formats.quants._CHUNK", 50 * 256)
    for mmap in (False, True):
        with GgufFile(path, mmap=mmap) as file:
            for dtype in (torch.float32, torch.float16):
                seen: list[int] = []
                got = file.read("w", dtype, progress=seen.append)
                assert torch.equal(got.nan_to_num(), want.to(dtype).nan_to_num())
                assert sum(seen) == raw.size
                assert len(seen) == 12


# -- the table -------------------------------------------------------------------------------


def test_g1_magic_and_version(path: Path) -> None:
    refused(path, b"", TruncatedError, "magic")
    refused(path, b"GG", TruncatedError, "magic")
    refused(path, small(magic=b"GGUX"), FormatError, "magic", "GGUX")
    assert refused(path, small(magic=b"FUGG"), FormatError, "magic").hint
    for version in (0, 1, 4, 99):
        error = refused(path, small(version=version), FormatError, "version", "2 or 3", str(version))
        assert error.hint
    big_endian = struct.pack(">4sIQQ", b"GGUF", 3, 0, 0)
    assert "endian" in str(refused(path, big_endian, FormatError, "version", "big-endian").hint)
    refused(path, b"PK\3\4" + bytes(30), UnsafeFormatError)
    refused(path, b"version https://git-lfs.github.com/spec/v1\n", FormatError, "LFS")


def test_g2_counts(path: Path) -> None:
    for field in ("n_keys", "n_tensors"):
        name = "n_kv" if field == "n_keys" else field
        for count in (2**64 - 1, 2**60, 65_537 if field == "n_keys" else 1_048_577, 1000):
            refused(path, small(**{field: count}), LimitExceeded, f"{name}:", str(count))
    # As many keys as the table allows, but one: a file of that many is refused, one fewer is read.
    keys = [kv(f"{i}", U8, b"\0") for i in range(65_537)]
    refused(path, gguf(keys, []), LimitExceeded, "n_kv")
    path.write_bytes(gguf(keys[:-1], []))
    with GgufFile(path) as file:
        assert len(file.metadata) == 65_536


def test_g3_keys(path: Path) -> None:
    def first(key: bytes) -> bytes:
        return gguf([u32("a", 1), key + struct.pack("<II", U32, 1)], [])

    at = len(gguf([u32("a", 1)], [], alignment=1))
    for length in (2**63, 2**40):
        assert refused(path, first(text("k", length)), FormatError, "key 1", exact=False).offset == at
    assert refused(path, first(text("")), FormatError, "key 1").offset == at
    assert refused(path, first(text(b"a\xff")), FormatError, "key 1", "UTF-8").offset == at + 9
    refused(path, first(text("a\0")), FormatError, "key 1")
    refused(path, first(text("a" * 65_536)), LimitExceeded, "key 1")
    path.write_bytes(first(text("a" * 65_535)))
    GgufFile(path).close()


def test_g4_value_types(path: Path) -> None:
    refused(path, gguf([kv("k", 99, bytes(8))], []), FormatError, "k:", "99")
    refused(path, gguf([kv("k", BOOL, b"\7")], []), FormatError, "k:", "boolean")
    refused(path, gguf([array("k", BOOL, 2, b"\1\2")], []), FormatError, "k:", "boolean")
    refused(path, gguf([array("k", 13, 1, bytes(8))], []), FormatError, "k:", "13")
    for depth in (2, 1000, 3000):
        nested = struct.pack("<IQ", ARR, 1) * depth + struct.pack("<IQ", U8, 1) + b"\0"
        refused(path, gguf([kv("k", ARR, nested)], []), FormatError, "k:", "array")


def test_g5_arrays_longer_than_the_file(path: Path) -> None:
    for code in (U8, F32, U64, STR, BOOL):
        for count in (2**60, 2**40, 2**64 - 1, 10_000_000, 500):
            refused(path, gguf([array("k", code, count, bytes(300))], []), LimitExceeded, "k:", str(count))
    refused(path, gguf([array("k", STR, 2, text("a") + text("b", 2**62))], []), TruncatedError, "k[1]")
    refused(path, gguf([array("k", STR, 2, text("a") + text(b"\xff"))], []), FormatError, "k[1]", "UTF-8")
    refused(path, gguf([kv("k", STR, text("b", 2**62))], []), TruncatedError, "k:")
    refused(path, gguf([kv("k", STR, text(b"\xc3"))], []), FormatError, "k:", "UTF-8")


def test_g6_duplicates(path: Path) -> None:
    refused(path, gguf([u32("k", 1), u32("k", 1)], []), FormatError, "k:", "twice")
    refused(path, gguf([], [tensor("w", [8]), tensor("w", [8], 0, 32)], bytes(64)), FormatError, "w:", "twice")


def test_g7_alignment(path: Path) -> None:
    key = "general.alignment"
    for value in (0, 1, 3, 4, 13, 2**17, 2**30, 2**31):
        refused(path, gguf([u32(key, value)], []), FormatError, f"{key}:", str(value))
    for other in (
        kv(key, I32, struct.pack("<i", 32)),
        kv(key, U64, struct.pack("<Q", 32)),
        kv(key, F32, struct.pack("<f", 32)),
        kv(key, BOOL, b"\1"),
        kv(key, STR, text("32")),
        array(key, U32, 1, struct.pack("<I", 32)),
    ):
        refused(path, gguf([other], []), FormatError, f"{key}:")
    for value in (8, 64, 65_536):
        two = [tensor("a", [1], 0, 0), tensor("b", [1], 0, value)]
        data = struct.pack("<f", 5) + bytes(value - 4) + struct.pack("<f", 6)
        path.write_bytes(gguf([u32(key, value)], two, data, alignment=value))
        with GgufFile(path) as file:
            assert file.alignment == value
            assert (file.read("a").item(), file.read("b").item()) == (5, 6)


def test_g8_number_of_dims(path: Path) -> None:
    for n in (0, 5, 1_000_000, 2**32 - 1):
        refused(path, gguf([], [tensor("w", [8], n_dims=n)], bytes(32)), LimitExceeded, "w:", "1 to 4", str(n))


def test_g9_dims(path: Path) -> None:
    for dims in ([0], [8, 0], [2**63], [2**32, 2**32], [2**64 - 1, 2], [2**31, 2**31, 2, 1], [2**62, 4]):
        refused(path, gguf([], [tensor("w", dims)], bytes(32)), ShapeMismatch, "w:", str(dims[0]))
    refused(path, gguf([], [tensor("w", [2**40])], bytes(32)), TruncatedError, "w:")


def test_g10_types(path: Path) -> None:
    for number in (999, 4, 31, 2**32 - 1, 16):
        refused(path, gguf([], [tensor("w", [256], number)], bytes(256)), DtypeError, "w:", str(number))
    refused(path, gguf([], [tensor("w", [33], 2)], bytes(64)), DtypeError, "w:", "Q4_0", "33")
    refused(path, gguf([], [tensor("w", [32, 8], 12)], bytes(256)), DtypeError, "w:", "Q4_K", "32")


def test_g11_c03_places(path: Path) -> None:
    def two(first: int, second: int, size: int = 64) -> bytes:
        return gguf([], [tensor("a", [8], 0, first), tensor("b", [8], 0, second)], bytes(size))

    start = len(two(0, 32, 0))
    path.write_bytes(two(32, 0))  # in the other order: nothing wrong
    GgufFile(path).close()
    assert refused(path, two(0, 2**40), FormatError, "b:", "gap").offset == start + 2**40
    refused(path, two(0, 2**64 - 32), FormatError, "b:")
    refused(path, two(0, 3), FormatError, "b:", "aligned")
    refused(path, two(0, 33), FormatError, "b:", "aligned")
    refused(path, two(0, 0), FormatError, "b:", "overlaps")
    refused(path, two(0, 64, 96), FormatError, "b:", "gap")
    refused(path, two(32, 64, 96), FormatError, "a:", "gap")
    whole = len(two(0, 32))
    refused(path, two(0, 32, 63), TruncatedError, "b:", str(whole), str(whole - 1))
    refused(path, two(0, 32, 16), TruncatedError, "a:")
    refused(path, two(0, 32)[: start - 4], TruncatedError, "a:")
    refused(path, two(0, 32, 74), FormatError, "after its last tensor", str(whole), str(whole + 10))
    refused(path, gguf([u32("k", 1)], []) + bytes(64), FormatError, "after its last tensor")


def test_g12_tensor_names(path: Path) -> None:
    def named(name: str | bytes) -> bytes:
        return gguf([], [tensor(name, [8])], bytes(32))

    refused(path, named("n" * 64), FormatError, "tensor 0", exact=False)
    refused(path, named("n" * 100), FormatError, "tensor 0", exact=False)
    for name in (b"a\xff", b"a\0b", b"", "\u202ea".encode()):
        refused(path, named(name), FormatError, "tensor 0")
    path.write_bytes(named("n" * 100))
    with GgufFile(path, max_name=256) as file:
        assert file.names() == ["n" * 100]
    path.write_bytes(named("../../etc/passwd"))  # text, and never a path
    with GgufFile(path) as file:
        assert file.read("../../etc/passwd").shape == (8,)


def test_g14_what_the_container_keeps_for_the_model_to_judge(path: Path) -> None:
    keys = [u32("llama.block_count", 10**9), kv("x.layers", F32, struct.pack("<f", 2.5))]
    path.write_bytes(gguf([*keys, array("tokenizer.ggml.scores", U8, 2, b"\1\2")], []))
    with GgufFile(path) as file:
        assert file.metadata["llama.block_count"] == 10**9
        assert file.type_of("x.layers") == "f32"
        assert file.type_of("tokenizer.ggml.scores") == "arr[u8]"  # not taken for floats (#26690)
        assert file.metadata["tokenizer.ggml.scores"].dtype == np.uint8  # type: ignore[union-attr]


def test_g21_nonfinite_scales_load_and_are_counted(path: Path) -> None:
    q8 = struct.pack("<H32b", 0x7C00, 0, *[1] * 31)  # d = inf: 0 · inf is NaN, the rest infinite
    plain = struct.pack("<8f", float("nan"), float("inf"), *range(6))
    tensors = [tensor("q", [32], 8, 0), tensor("w", [8], 0, 64), tensor("ok", [2], 26, 96)]
    path.write_bytes(gguf([], tensors, q8 + bytes(30) + plain + bytes(8)))
    with GgufFile(path) as file:
        assert file.read("q").isnan().tolist() == [True] + [False] * 31
        assert file.read("q")[1] == float("inf")
        assert file.count_nonfinite() == {"q": 32, "w": 2}


def test_g22_every_prefix_is_an_error(path: Path) -> None:
    whole = small() + b""
    end = len(whole) - 28  # the last tensor's padding may be missing
    for size in range(end):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"m\.gguf"):
            GgufFile(path).close()
    for size in range(end, len(whole) + 1):
        path.write_bytes(whole[:size])
        GgufFile(path).close()


def test_g22_every_prefix_of_four_kilobytes(path: Path) -> None:
    words = array("x.words", STR, 200, b"".join(text(f"word {i}") for i in range(200)))
    whole = gguf([words], [tensor("w", [256], 0)], bytes(1024))
    assert len(whole) > 4096
    path.write_bytes(whole)
    for size in range(len(whole) - 1, -1, -1):
        os.truncate(path, size)
        with pytest.raises(FormatError):
            GgufFile(path).close()


def test_g22_every_flipped_byte_is_an_error_or_a_file(path: Path) -> None:
    whole = small()
    good = 0
    for i in range(len(whole) - 96):
        for mask in (0x01, 0x80, 0xFF):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ mask]) + whole[i + 1 :])
            try:
                with GgufFile(path) as file:
                    for name in file.names():
                        assert file.read(name).shape == file.info(name).shape
                good += 1
            except CutawayError:
                continue
    assert good  # letters of keys, values


# -- bombs (C05, T11) ------------------------------------------------------------------------

TWO_TO = {n: 1 << n for n in (30, 32, 40, 60, 63)}


ONE = [tensor("blk.0.w", [8])]
NESTED = struct.pack("<IQ", ARR, 1) * 1000
# Makers of hostile files (some are large), and the field that each error must name.
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "n_dims 1e6": (lambda: gguf([], [tensor("blk.0.w", [8], n_dims=10**6)], bytes(32)), "blk.0.w"),
    "dims wrap": (lambda: gguf([], [tensor("blk.0.w", [2**64 - 1, 2])], bytes(32)), "blk.0.w"),
    "key length": (lambda: gguf([text("k", TWO_TO[40])], ONE, bytes(32)), "key 0"),
    "array count": (lambda: gguf([array("k", U8, TWO_TO[40], b"")], ONE, bytes(32)), "k"),
    "alignment 0": (lambda: gguf([u32("general.alignment", 0)], ONE, bytes(32)), "general.alignment"),
    "alignment 3": (lambda: gguf([u32("general.alignment", 3)], ONE, bytes(32)), "general.alignment"),
    "alignment 2^30": (lambda: gguf([u32("general.alignment", TWO_TO[30])], ONE, bytes(32)), "general.alignment"),
    "tensor count": (lambda: gguf([], ONE, bytes(32), n_tensors=TWO_TO[60]), "n_tensors"),
    "offset past the end": (lambda: gguf([], [tensor("blk.0.w", [8], 0, TWO_TO[40])], bytes(32)), "blk.0.w"),
    "nested arrays": (lambda: gguf([kv("k", ARR, NESTED)], ONE, bytes(32)), "k"),
    "string length": (lambda: gguf([kv("k", STR, text("v", TWO_TO[63]))], ONE, bytes(32)), "k"),
    "long string": (lambda: gguf([kv("k", STR, text(b"v" * (13 << 20)))], []), "k"),
    "long item": (lambda: gguf([array("k", STR, 1, text(b"v" * (2 << 20)))], []), "k[0]"),
    "short strings": (lambda: gguf([array("k", STR, 2_000_000, text("ab") * 2_000_000)], []), "k"),
    "empty strings": (lambda: gguf([array("k", STR, 4_000_000, bytes(32_000_000))], []), "k"),
    "wide items": (lambda: gguf([array("k", STR, 40, text("😀" + "a" * 1_000_000) * 40)], []), "k"),
    "wide strings": (
        lambda: gguf([kv(f"k{i}", STR, text("😀" + "a" * 12_000_000)) for i in range(4)], []),
        "k1",
    ),
    "many tensors": (lambda: gguf([], [], bytes(40_000_000), n_tensors=1_000_000), "n_tensors"),
}


# Opens each file it is told of in a process of its own, and says what was raised and how far its memory grew, whoever
# asked for it: Python, numpy or the reader's native code.
PROBE = """
import json, os, signal, sys, time
from cutaway.errors import CutawayError
from cutaway.formats.gguf import GgufFile

def memory(word):
    line = next(line for line in open("/proc/self/status") if line.startswith(word))
    return int(line.split()[1]) << 10

for path in map(str.strip, sys.stdin):
    if (child := os.fork()) == 0:
        signal.alarm(60)  # a hang
        open("/proc/self/clear_refs", "w").write("5")  # the peak is measured from here
        before, start, found = memory("VmRSS"), time.process_time(), {"error": None}
        try:
            GgufFile(path).close()
        except CutawayError as error:
            found = {"error": type(error).__name__, "field": str(error.field)}
        found |= {"peak": memory("VmHWM") - before, "seconds": time.process_time() - start}
        print(json.dumps(found), flush=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        print(json.dumps({"error": f"exit {status}", "field": "", "peak": 0, "seconds": 0}), flush=True)
"""
Probe = Callable[[Path], dict[str, Any]]


@pytest.fixture(scope="module")
def probe() -> Iterator[Probe]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PROBE], **pipes) as process:  # type: ignore[call-overload]

        def ask(path: Path) -> dict[str, Any]:
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured as Linux tells it")
@pytest.mark.parametrize("name", BOMBS)
def test_c05_t11_bombs_cost_little_memory(path: Path, name: str, probe: Probe) -> None:
    """An error that names the field, and never a gigabyte: at most 4 MB for a small file (the case allows 50)."""
    make, field = BOMBS[name]
    path.write_bytes(make())
    size = path.stat().st_size
    found = probe(path)
    print(f"{name}: {found['peak'] / 2**20:.1f} MB over {size / 2**20:.1f}, {found['seconds']:.2f} s of computing")
    assert found["error"] in {error.__name__ for error in (FormatError, ShapeMismatch, *FormatError.__subclasses__())}
    assert field in found["field"]
    assert found["peak"] < (4 << 20 if size < 1 << 20 else size + (64 << 20))


def test_a_bomb_would_be_seen(path: Path, probe: Probe) -> None:
    """The probe counts native memory: a good file of 60 MB, which numpy holds."""
    path.write_bytes(gguf([array("k", U8, 60_000_000, bytes(60_000_000))], []))
    found = probe(path)
    assert found["error"] is None
    assert 59_000_000 < found["peak"] < 90_000_000


def test_a_large_array_of_numbers_is_held_once(path: Path) -> None:
    path.write_bytes(gguf([array("k", U8, 50_000_000, bytes(50_000_000))], []))
    tracemalloc.start()
    with GgufFile(path) as file:
        assert len(file.metadata["k"]) == 50_000_000  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60_000_000


# -- what files do ---------------------------------------------------------------------------


def test_s19_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in (".", "fifo"):
        with pytest.raises(FormatError):
            GgufFile(tmp_path / name)
    with pytest.raises(StorageError):
        GgufFile(tmp_path / "none")


@pytest.mark.parametrize("change", ["truncate", "overwrite", "remove"])
def test_t12_what_happens_to_the_file_later_reaches_no_tensor(path: Path, change: str) -> None:
    data = np.arange(20_000, dtype=np.float32)
    path.write_bytes(
        gguf([], [tensor("a", [20_000], 0, 0), tensor("b", [20_000], 1, 80_000)], bytes(data) * 2)[:-40_000]
    )
    with GgufFile(path) as file:
        weights, raw = file.read("a"), file.raw("b")
        before = raw.copy()
        if change == "truncate":
            os.truncate(path, 0)
        elif change == "overwrite":
            path.write_bytes(bytes(path.stat().st_size))
        else:
            path.unlink()
        assert np.array_equal(weights.numpy(), data)
        assert np.array_equal(raw, before)
        if change == "truncate":
            for name in ("a", "b"):
                with pytest.raises(TruncatedError, match=f"{name}: "):
                    file.read(name)


def test_mapped_bytes_may_be_written_to_and_the_file_stays(path: Path) -> None:
    path.write_bytes(small())
    with GgufFile(path, mmap=True) as file:
        file.read("a").zero_()
        file.raw("b")[:] = 0
    assert path.read_bytes() == small()


def test_the_table_of_errors_leaves_no_file_open(path: Path) -> None:
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    for _ in range(5):
        refused(path, small()[:-40], TruncatedError)
    assert len(os.listdir("/proc/self/fd") if before else []) == len(before)


def test_the_limits_can_be_reached_in_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_TENSORS", 1)
    refused(path, small(), LimitExceeded, "n_tensors", "at most 1")


# -- files in parts (G20) --------------------------------------------------------------------


def part(i: int, count: int, tensors: dict[str, float], *, total: int = 3, arch: str | None = None) -> bytes:
    keys = [
        kv("split.no", U16, struct.pack("<H", i)),
        kv("split.count", U16, struct.pack("<H", count)),
        kv("split.tensors.count", I32, struct.pack("<i", total)),
    ]
    if arch:
        keys.append(kv("general.architecture", STR, text(arch)))
    table = [tensor(name, [8], 0, 32 * j) for j, name in enumerate(tensors)]
    return gguf(keys, table, b"".join(struct.pack("<8f", *[value] * 8) for value in tensors.values()))


def write_parts(folder: Path, parts: list[bytes], stem: str = "m") -> Path:
    for i, data in enumerate(parts):
        (folder / f"{stem}-{i + 1:05d}-of-{len(parts):05d}.gguf").write_bytes(data)
    return folder / f"{stem}-00001-of-{len(parts):05d}.gguf"


GOOD = [part(0, 3, {"a": 1}, arch="llama"), part(1, 3, {"b": 2}), part(2, 3, {"c": 3})]


def split_refused(first: Path, *words: str, field: str | None = None) -> CutawayError:
    with pytest.raises(ShardError) as caught:
        open_gguf(first)
    assert type(caught.value) is ShardError
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)
    return caught.value


@pytest.mark.parametrize("mmap", [False, True])
def test_g20_parts_read_like_one_file(tmp_path: Path, mmap: bool) -> None:
    first = write_parts(tmp_path, GOOD)
    with open_gguf(first, mmap=mmap) as file:
        assert isinstance(file, SplitGguf)
        assert file.names() == ["a", "b", "c"]
        assert file.metadata["general.architecture"] == "llama"
        assert file.type_of("split.no") == "u16"
        assert file.info("b").shape == (8,)
        assert file.tensors["c"].name == "c"
        assert file.read("c")[0] == 3
        assert file.read("b", torch.float16).dtype is torch.float16
        assert file.raw("a").shape == (1, 32)
        assert file.count_nonfinite() == {}
        with pytest.raises(ShapeMismatch, match="d: "):
            file.read("d")


def test_g20_one_file_is_one_file(path: Path, tmp_path: Path) -> None:
    path.write_bytes(small())
    with open_gguf(path) as file:
        assert isinstance(file, GgufFile)
    path.write_bytes(part(0, 1, {"a": 1}, total=1))
    with open_gguf(path) as file:
        assert isinstance(file, GgufFile)


def test_g20_as_the_official_writer_splits(tmp_path: Path) -> None:
    writer = oracle.GGUFWriter(tmp_path / "w.gguf", "llama", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full((2, 8), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "w-00001-of-00003.gguf") as file:
        assert {name: file.read(name)[0, 0].item() for name in file.names()} == {f"t{i}": i for i in range(5)}


def test_g20_parts_that_do_not_fit(tmp_path: Path) -> None:
    def broken(i: int, data: bytes) -> Path:
        return write_parts(tmp_path, [*GOOD[:i], data, *GOOD[i + 1 :]])

    first = write_parts(tmp_path, GOOD)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    split_refused(first, "missing", "m-00002-of-00003.gguf")
    split_refused(broken(1, part(0, 3, {"b": 2})), "00002", field="split.no")
    split_refused(broken(1, part(2, 3, {"b": 2})), "00002", field="split.no")
    split_refused(broken(2, part(2, 4, {"c": 3})), "00003", field="split.count")
    split_refused(broken(1, part(1, 3, {"b": 2}, arch="gemma3")), "gemma3", field="general.architecture")
    split_refused(broken(1, part(1, 3, {"a": 2})), "00002", field="a")
    split_refused(broken(1, part(1, 3, {"b": 2, "d": 4})), field="split.tensors.count")
    split_refused(broken(1, part(1, 3, {"b": 2}, total=9)), "00002", field="split.tensors.count")
    split_refused(broken(1, small()), "00002", field="split.no")
    split_refused(broken(0, part(0, 2, {"a": 1})), field="split.count")


@pytest.mark.parametrize(
    "value",
    [array("split.count", U16, 2, bytes(4)), kv("split.count", STR, text("3")), kv("split.count", F64, bytes(8))],
)
def test_g20_split_keys_of_other_types(tmp_path: Path, value: bytes) -> None:
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(gguf([value], []))
    split_refused(tmp_path / "m-00001-of-00003.gguf", field="split.count")


def test_g20_opening_another_part_or_a_renamed_one(tmp_path: Path) -> None:
    write_parts(tmp_path, GOOD)
    error = split_refused(tmp_path / "m-00002-of-00003.gguf", "not the first part")
    assert error.hint == "open m-00001-of-00003.gguf"
    (tmp_path / "m-00001-of-00003.gguf").rename(tmp_path / "renamed.gguf")
    split_refused(tmp_path / "renamed.gguf", "named")


def test_g20_t28_a_part_may_not_link_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    first = write_parts(folder, GOOD)
    (folder / "m-00002-of-00003.gguf").rename(tmp_path / "elsewhere")
    (folder / "m-00002-of-00003.gguf").symlink_to("../elsewhere")
    split_refused(first, "links out")


def test_g20_a_damaged_part_is_named(tmp_path: Path) -> None:
    first = write_parts(tmp_path, GOOD)
    os.truncate(tmp_path / "m-00003-of-00003.gguf", 30)
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    with pytest.raises(FormatError, match="m-00003-of-00003"):
        open_gguf(first)
    assert len(os.listdir("/proc/self/fd") if before else []) == len(before)
