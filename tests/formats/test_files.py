"""Opening, sniffing, strict JSON and atomic writing: rows S18, S19, S22, H1, H2, T28, T29, F2, F17."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import numpy as np
import pytest

from cutaway.errors import (
    ConfigError,
    CutawayError,
    FormatError,
    LimitExceeded,
    ShardError,
    StorageError,
    TruncatedError,
    UnsafeFormatError,
)
from cutaway.formats import files
from cutaway.formats.files import (
    atomic_write,
    open_regular,
    parse_json,
    pointer,
    read_into,
    read_json,
    read_small,
    refuse_foreign,
    resolve_inside,
    sniff,
)

# -- opening (S19) ---------------------------------------------------------------------------


def test_a_regular_file_opens(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with open_regular(tmp_path / "a") as file:
        assert file.read() == b"abc"


def test_directory_fifo_device_and_socket_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    listener = socket.socket(socket.AF_UNIX)
    where = os.getcwd()
    os.chdir(tmp_path)  # a socket's path must be short
    try:
        listener.bind("socket")
    finally:
        os.chdir(where)
    with listener:
        for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero"), tmp_path / "socket"):
            with pytest.raises(FormatError, match="not a regular file") as caught:
                open_regular(path)
            assert caught.value.path == str(path)


def test_what_the_system_refuses_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("missing", "dangling", "loop", "a" * 300, "nul\0"):
        with pytest.raises(StorageError):
            open_regular(tmp_path / name)

    def denied(*args: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # the tests may run as root, whom nothing is denied
    with pytest.raises(StorageError, match="Permission denied"):
        open_regular(tmp_path / "a")


# -- sniffing (S22) --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"GGUF\3\0\0\0", "gguf"),
        (b"\x80\x02\0\0\0\0\0\0{}", "safetensors-like"),  # a header length that looks like a pickle
        (b"\x80\x02\x28\0\0\0\0\0", None),  # the same, cut
        (b"PK\3\4\x14\0\0\0\0\0", "zip/pickle"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "zip/pickle"),
        (b"\x80\x04\x95\x0b\0\0\0\0\0\0\0}", "zip/pickle"),
        (b"\x80\x02N.", "zip/pickle"),
        (b"\x93NUMPY\1\0", "zip/pickle"),
        (bytes(257) + b"ustar", "zip/pickle"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git-lfs pointer"),
        (b"\n<!DOCTYPE html><html>", "html"),
        (b"<HTML>", "html"),
        (b"", None),
        (b"hello", None),
    ],
)
def test_sniff(head: bytes, kind: str | None) -> None:
    assert sniff(head) == kind


def test_foreign_files_are_refused_with_what_to_do() -> None:
    refuse_foreign(b"GGUF", path="x", wanted="gguf")
    refuse_foreign(b"anything", path="x", wanted="gguf")
    with pytest.raises(UnsafeFormatError) as unsafe:
        refuse_foreign(b"PK\3\4", path="model.safetensors", wanted="safetensors")
    assert unsafe.value.path == "model.safetensors"
    assert "safetensors" in str(unsafe.value.hint)
    with pytest.raises(FormatError) as pointer_file:
        refuse_foreign(b"version https://git-lfs.github.com/spec/v1\n", path="x", wanted="gguf")
    assert pointer_file.value.hint == "git lfs pull"
    with pytest.raises(FormatError, match="web page"):
        refuse_foreign(b"<html>", path="x", wanted="gguf")
    with pytest.raises(FormatError, match="expected safetensors, got gguf"):
        refuse_foreign(b"GGUF", path="x", wanted="safetensors")


# -- reading ---------------------------------------------------------------------------------


def test_read_into_reports_progress_and_notices_a_short_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 4)
    (tmp_path / "a").write_bytes(bytes(range(10)))
    seen: list[int] = []
    into = np.zeros(9, np.uint8)
    with open_regular(tmp_path / "a") as file:
        read_into(file, 1, into, path="a", progress=seen.append)
        assert into.tolist() == list(range(1, 10))
        assert seen == [4, 4, 1]
        with pytest.raises(TruncatedError, match=r"a: t: byte 10: ends early"):
            read_into(file, 2, into, path="a", field="t")


def test_read_small_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_small(tmp_path / "a", limit=5) == b"12345"
    with pytest.raises(LimitExceeded):
        read_small(tmp_path / "a", limit=4)


# -- names from strangers (T28) --------------------------------------------------------------


def test_names_stay_inside_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    (root / "a").touch()
    (root / "inner").symlink_to("a")
    assert resolve_inside(root, "a") == (root / "a").resolve()
    assert resolve_inside(root, "inner") == (root / "a").resolve()
    assert resolve_inside(root, "sub/new").name == "new"
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to("..")
    bad = ["", ".", "..", "../x", "sub/../../x", "/etc/passwd", "a//b", "a/", "..\\x", "C:x", "c:\\x", "a\0b"]
    for name in [*bad, "a\n", "\u202ea", "\ud800", "out", "up/x"]:
        with pytest.raises(ShardError) as caught:
            resolve_inside(root, name, field="/weight_map/t")
        assert caught.value.field == "/weight_map/t"


def test_a_hub_snapshot_may_link_to_its_blobs_only(tmp_path: Path) -> None:
    repo = tmp_path / "models--who--what"
    snapshot = repo / "snapshots" / "abc"
    (snapshot / "onnx").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "1234").touch()
    (repo / "other").touch()
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    (snapshot / "onnx" / "a").symlink_to("../../../blobs/1234")
    (snapshot / "bad").symlink_to("../../other")
    assert resolve_inside(snapshot, "config.json") == (repo / "blobs" / "1234").resolve()
    assert resolve_inside(snapshot / "onnx", "a") == (repo / "blobs" / "1234").resolve()
    with pytest.raises(ShardError):
        resolve_inside(snapshot, "bad")


# -- JSON (S3, S18, H1, H2) ------------------------------------------------------------------


def test_good_json() -> None:
    data = b' {"a": [1, 2.5, true, null, "\xc3\xa9\\ud83d\\ude00"], "b": {"a": 1}} '
    assert parse_json(data, path="x", limit=100) == {"a": [1, 2.5, True, None, "é😀"], "b": {"a": 1}}
    assert pointer("a/b", "~", 3) == "/a~1b/~0/3"


@pytest.mark.parametrize(
    ("data", "field", "offset", "words"),
    [
        (b"", None, 0, "not JSON"),
        (b'{"a": 1,}', None, 8, "not JSON"),
        (b'{"\xc3\xa9": x}', None, 7, "not JSON"),
        (b"\xef\xbb\xbf{}", None, 0, "byte order mark"),
        (b'{"a": "\xff"}', None, 7, "UTF-8"),
        ('{"a": 1}'.encode("utf-16"), None, 0, "UTF-8"),
        (b'{"NaN": NaN}', None, 8, "finite"),
        (b'["-Infinity", -Infinity]', None, 14, "finite"),
        (b"[1e999]", None, 1, "finite"),
        (b"[" + b"9" * 5000 + b"]", None, None, "too long"),
        (b'{"a": [0, {"b/c": 1, "d": 2, "b/c": 1}]}', "/a/1/b~1c", None, "twice"),
        (b'{"a": 1, "a": 2}', "/a", None, "twice"),
        (b"[" * 100_000, None, 0, "deep"),
        (b'{"a":' * 100_000, None, 0, "deep"),
        (b"[" * 65 + b"]" * 65, None, 0, "deep"),
        (b'["\\ud800"]', None, None, "surrogate"),
    ],
)
@pytest.mark.parametrize("error", [FormatError, ConfigError])
def test_json_that_is_refused(
    data: bytes, field: str | None, offset: int | None, words: str, error: type[CutawayError]
) -> None:
    with pytest.raises(error, match=words) as caught:
        parse_json(data, path="config.json", limit=1 << 20, error=error, offset=0)
    assert type(caught.value) is error
    assert caught.value.path == "config.json"
    assert caught.value.field == field
    assert caught.value.offset == offset


def test_json_of_exactly_the_allowed_depth() -> None:
    assert parse_json(b"[" * 64 + b"]" * 64, path="x", limit=1000)


def test_json_has_a_limit_and_counts_offsets_from_the_file(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded):
        parse_json(b"[1, 2]", path="x", limit=5, error=ConfigError)
    with pytest.raises(FormatError) as caught:
        parse_json(b"[x]", path="x", limit=5, offset=8)
    assert caught.value.offset == 9
    (tmp_path / "a.json").write_bytes(b'{"a": 1}')
    assert read_json(tmp_path / "a.json", limit=8) == {"a": 1}
    with pytest.raises(LimitExceeded):
        read_json(tmp_path / "a.json", limit=7)


# -- writing (F2, F17, T29) ------------------------------------------------------------------


def test_a_new_file_appears_whole_with_the_mode_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "a") as file:
            file.write(b"new")
            assert not (tmp_path / "a").exists()
            assert Path(file.name).parent == tmp_path
    finally:
        os.umask(old)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a"]


class Stop(BaseException):
    """Something that is no Exception, as an interrupt is not."""


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "I/O"), Stop()])
def test_whichever_step_fails_the_old_file_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int, fault: BaseException
) -> None:
    target = tmp_path / "a"
    target.write_bytes(b"old")
    calls = 0

    def failing(name: str) -> None:
        real = getattr(os, name)

        def step(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == when:
                raise fault
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, step)

    for name in ("chmod", "fsync", "replace"):
        failing(name)
    expected = StorageError if isinstance(fault, OSError) else Stop

    def write() -> None:
        with atomic_write(target) as file:
            file.write(b"new")
            if when == 0:
                raise fault

    if when < 5:
        with pytest.raises(expected):
            write()
    else:  # past the last step: the sweep has met every one
        write()
    monkeypatch.undo()
    # Step 4 is the sync of the folder, after the new file has its name.
    assert target.read_bytes() == (b"old" if when < 4 else b"new")
    assert os.listdir(tmp_path) == ["a"]


def test_writing_where_one_cannot(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "a", tmp_path / "file" / "a", tmp_path, tmp_path / "a\0", tmp_path / ("a" * 300)):
        with pytest.raises(StorageError), atomic_write(path) as file:
            file.write(b"new")
    with pytest.raises(StorageError, match="too full"), atomic_write(tmp_path / "a", expect=1 << 62):
        pass
    assert os.listdir(tmp_path) == ["file"]


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), atomic_write(tmp_path / "a"):
        raise ValueError("mine")
    assert os.listdir(tmp_path) == []


def test_a_name_of_full_length_can_be_written(tmp_path: Path) -> None:
    with atomic_write(tmp_path / ("a" * 255)) as file:
        file.write(b"new")
    assert len(os.listdir(tmp_path)) == 1
