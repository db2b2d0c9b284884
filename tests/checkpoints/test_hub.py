"""What the hub client does when the hub, the network or the cache misbehaves. All against a stand-in on 127.0.0.1."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cutaway.checkpoints import hub
from cutaway.checkpoints.hub_id import HubId, parse_id
from cutaway.errors import DownloadError, OfflineError, RequestError, StorageError


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hub_server = _load("hub_server")
Fault, Repo = hub_server.Fault, hub_server.Repo

WEIGHTS = bytes(range(256)) * 4000
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "modeling_x.py": b"raise SystemExit",
    "README.md": b"words",
    "onnx/model.safetensors": b"another",
}
READ = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


class Bench:
    """The stand-in hub, a cache of its own, and a record of how long anybody wanted to wait."""

    def __init__(self, server: Any, cache: Path) -> None:
        self.server = server
        self.cache = cache
        self.waits: list[float] = []

    def repo(self, **kwargs: Any) -> Path:
        return hub.fetch_repo("o/n", endpoint=self.server.url, sleep=self.waits.append, **kwargs)

    def file(self, name: str, **kwargs: Any) -> Path:
        return hub.fetch_file("o/n", name, endpoint=self.server.url, sleep=self.waits.append, **kwargs)

    def fault(self, kind: str, **kwargs: Any) -> None:
        self.server.faults.append(Fault(kind, **kwargs))

    def published(self) -> list[str]:
        return sorted(p.name for p in self.cache.glob("models--*/snapshots/*/*"))

    def litter(self) -> list[Path]:
        return [p for p in self.cache.rglob("*") if ".incomplete" in p.name or p.name.endswith(".tmp")]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    import huggingface_hub.constants as constants
    import huggingface_hub.file_download as file_download
    import huggingface_hub.utils._http as http

    cache = tmp_path / "hub"
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "cutaway"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # what it resumes at is a multiple of it
    with hub_server.running() as server:
        bench = Bench(server, cache)
        clock = SimpleNamespace(sleep=bench.waits.append)
        monkeypatch.setattr(http, "time", clock)
        monkeypatch.setattr(file_download, "time", clock)
        server.repos["o/n"] = Repo(dict(FILES))
        yield bench
    http.close_session()


def test_only_what_a_model_is_read_from_is_fetched(bench: Bench) -> None:
    seen: list[tuple[int, int, str]] = []
    folder = bench.repo(progress=lambda done, total, label: seen.append((done, total, label)))
    assert sorted(p.name for p in folder.iterdir()) == READ
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert bench.cache in folder.parents
    assert folder.name == hub_server.COMMIT
    total = sum(len(FILES[name]) for name in READ)
    assert seen[-1] == (total, total, "o/n")
    assert hub.list_files("o/n", endpoint=bench.server.url) == sorted(FILES)


def test_what_stands_beside_an_encoder_is_fetched(bench: Bench) -> None:
    """How vectors are pooled lies in a folder of its own; other formats and other models lie in folders too."""
    more = {
        "1_Pooling/config.json": b"{}",
        "modules.json": b"[]",
        "sentence_bert_config.json": b"{}",
        "vocab.txt": b"words",
        "source.spm": b"pieces",
    }
    others = {"onnx/tokenizer.json": b"1", "tokenizer/tokenizer.json": b"2", "text_encoder/model.safetensors": b"3"}
    bench.server.repos["o/encoder"] = Repo({**FILES, **more, **others})
    folder = hub.fetch_repo("o/encoder", endpoint=bench.server.url)
    found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())
    assert found == sorted([*READ, *more])


def test_a_second_time_and_a_pinned_commit_download_nothing(bench: Bench) -> None:
    first = bench.repo()
    bench.server.seen.clear()
    assert bench.repo() == first
    assert [seen.path for seen in bench.server.seen] == ["/api/models/o/n"]
    bench.server.seen.clear()
    assert bench.repo(revision=hub_server.COMMIT) == first
    assert hub.fetch_repo(f"o/n@{hub_server.COMMIT}", endpoint=bench.server.url) == first
    assert bench.server.seen == []


def test_the_token_goes_to_the_hub_and_to_nobody_else(bench: Bench) -> None:
    bench.server.cdn = True
    bench.repo()
    away = [seen for seen in bench.server.seen if seen.path.startswith("/cdn/")]
    at_home = [seen for seen in bench.server.seen if not seen.path.startswith("/cdn/")]
    assert away
    assert all("authorization" not in seen.headers for seen in away)
    assert all(seen.headers["authorization"] == "Bearer hf_secret" for seen in at_home)


def test_offline_uses_the_cache_and_opens_no_socket(bench: Bench) -> None:
    folder = bench.repo()
    gguf = {"a.gguf": b"GGUF"}
    bench.server.repos["o/n"].files |= gguf
    bench.server.seen.clear()
    code = f"""
import sys
sockets = []
sys.addaudithook(lambda event, args: sockets.append(event) if event.startswith("socket.") else None)
from cutaway.checkpoints import hub
assert str(hub.fetch_repo("o/n", offline={{offline}})) == {str(folder)!r}
assert str(hub.fetch_file("o/n", "config.json", offline={{offline}})) == {str(folder / "config.json")!r}
assert "README.md" in hub.list_files("o/n", offline={{offline}})
from cutaway.errors import OfflineError
for call in (lambda: hub.fetch_repo("o/other", offline={{offline}}),
             lambda: hub.fetch_file("o/n", "a.gguf", offline={{offline}}),
             lambda: hub.list_files("o/other", offline={{offline}}),
             lambda: hub.fetch_repo("o/n@v1", offline={{offline}})):
    try:
        call()
    except OfflineError as error:
        assert error.hint, error
    else:
        raise AssertionError("not refused")
assert "torch" not in sys.modules
assert not [s for s in sockets if "connect" in s or "getaddrinfo" in s], sockets
"""
    env = {**os.environ, "HF_HUB_CACHE": str(bench.cache), "HF_ENDPOINT": bench.server.url}
    for offline, extra in (("True", {}), ("False", {"HF_HUB_OFFLINE": "1"})):
        subprocess.run([sys.executable, "-c", code.format(offline=offline)], env=env | extra, check=True, timeout=60)
    assert bench.server.seen == []


def test_offline_names_the_missing_file(bench: Bench) -> None:
    folder = bench.repo()
    (folder / "model.safetensors").unlink()
    with pytest.raises(OfflineError) as caught:
        bench.repo(offline=True)
    assert caught.value.field == "model.safetensors"
    with pytest.raises(OfflineError, match=r"b\.gguf"):
        bench.file("b.gguf", offline=True)


def test_an_unreachable_hub_is_an_error_or_the_cache(bench: Bench) -> None:
    with pytest.raises(DownloadError, match="cannot be reached") as caught:
        hub.fetch_repo("o/n", endpoint="http://127.0.0.1:9", sleep=bench.waits.append)
    assert not isinstance(caught.value, OfflineError)
    assert caught.value.field is not None
    assert caught.value.field.startswith("http://127.0.0.1:9/")
    folder = bench.repo()
    assert hub.fetch_repo("o/n", endpoint="http://127.0.0.1:9", sleep=bench.waits.append) == folder


@pytest.mark.parametrize(
    ("status", "headers", "says", "hint"),
    [
        (401, {"X-Error-Code": "GatedRepo"}, "gated", "log in"),
        (403, {"X-Error-Code": "GatedRepo"}, "gated", "log in"),
        (401, {}, "refuses access", "HF_TOKEN"),
        (403, {}, "refuses access", "HF_TOKEN"),
        (404, {"X-Error-Code": "RepoNotFound"}, "does not have", "check the name"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "does not have", "revision"),
        (410, {}, "refuses the request", "check"),
        (429, {"Retry-After": "1000"}, "fewer requests", "1000 s"),
        (500, {}, "in trouble", "later"),
    ],
)
@pytest.mark.parametrize(("on", "method"), [("/api/models", "GET"), ("/resolve/", "HEAD"), ("/resolve/", "GET")])
def test_a_status_is_a_typed_error(
    bench: Bench, status: int, headers: dict[str, str], says: str, hint: str, on: str, method: str
) -> None:
    bench.fault("status", on=on, method=method, status=status, headers=headers)
    with pytest.raises(DownloadError, match=says) as caught:
        bench.file("model.safetensors")
    assert caught.value.got == f"HTTP {status}"
    assert caught.value.field is not None
    assert caught.value.field.startswith(bench.server.url)
    assert hint in (caught.value.hint or "")
    assert "hf_secret" not in str(caught.value)
    assert bench.published() == []


@pytest.mark.parametrize(("on", "method"), [("/revision/", "GET"), ("/tree/", "GET"), ("/resolve/", "GET")])
@pytest.mark.parametrize(("status", "headers"), [(500, {}), (503, {"Retry-After": "7"}), (429, {"Retry-After": "7"})])
def test_trouble_that_passes_is_waited_for(
    bench: Bench, status: int, headers: dict[str, str], on: str, method: str
) -> None:
    bench.fault("status", on=on, method=method, status=status, headers=headers, times=2)
    folder = bench.repo(revision="v1")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert bench.waits
    if headers:
        assert all(wait >= 7 for wait in bench.waits)  # as long as it was told to


def test_waits_grow(bench: Bench) -> None:
    bench.fault("status", on="/api/models", status=500)
    with pytest.raises(DownloadError):
        bench.repo()
    assert bench.waits == [1, 2, 4, 8]


def test_a_connection_that_closes_is_resumed(bench: Bench) -> None:
    bench.fault("close", on="model.safetensors", at=100_000, times=1)
    bench.fault("close", on="model.safetensors", at=200_000, times=1)
    assert bench.file("model.safetensors").read_bytes() == WEIGHTS
    ranges = [s.headers.get("range") for s in bench.server.seen if s.method == "GET" and "/resolve/" in s.path]
    assert ranges == [None, "bytes=100000-", "bytes=300000-"]


def test_a_server_that_ignores_ranges_is_started_over(bench: Bench) -> None:
    bench.fault("close", on="model.safetensors", at=100_000, times=1)
    bench.fault("ignore-range", on="model.safetensors")
    assert bench.file("model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("at", [0, 1, 4096, len(WEIGHTS) - 1])
def test_a_reset_is_tried_again(bench: Bench, at: int) -> None:
    bench.fault("reset", on="model.safetensors", at=at, times=2)
    assert bench.file("model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("kind", ["close", "reset", "wrong-length", "html", "flip"])
def test_a_body_that_stays_wrong_publishes_nothing(bench: Bench, kind: str) -> None:
    bench.fault(kind, on="model.safetensors", at=0 if kind in ("close", "reset") else 77)
    with pytest.raises(DownloadError):
        bench.file("model.safetensors")
    assert bench.published() == []
    assert list(bench.cache.glob("models--*/blobs/*")) == []
    assert bench.litter() == []
    bench.server.faults.clear()
    assert bench.file("model.safetensors").read_bytes() == WEIGHTS  # and it stands in nobody's way


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_one_flipped_bit_is_found(bench: Bench, name: str) -> None:
    bench.fault("flip", on=f"/{name}", at=len(FILES[name]) // 2)
    with pytest.raises(DownloadError, match="checksum") as caught:
        bench.repo()
    assert caught.value.path == f"o/n/{name}"
    assert caught.value.expected != caught.value.got
    assert name not in bench.published()


def test_a_blob_that_nobody_checked_is_checked(bench: Bench) -> None:
    """A process killed between the library's rename and our check leaves such a blob; so may another tool."""
    import huggingface_hub

    bench.fault("flip", on="model.safetensors", at=5)
    path = huggingface_hub.hf_hub_download("o/n", "model.safetensors", endpoint=bench.server.url)
    bench.server.faults.clear()
    with pytest.raises(DownloadError, match="checksum"):
        bench.repo(offline=True)
    assert Path(path).exists()  # offline it cannot be had again, so it stays for its owner to look at
    with pytest.raises(DownloadError, match="checksum"):
        bench.repo()
    assert (bench.repo() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_checked_blob_that_changes_is_checked_again(bench: Bench) -> None:
    path = bench.repo() / "model.safetensors"
    path.write_bytes(WEIGHTS[:-1] + b"x")
    with pytest.raises(DownloadError, match="checksum"):
        bench.repo()


def test_a_cache_without_links_is_checked_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", True)
    folder = bench.repo()
    assert not (folder / "model.safetensors").is_symlink()
    bench.server.repos["o/n"].files["b.gguf"] = b"GGUF" * 99
    bench.server.repos["o/n"].commit = "f" * 40
    bench.fault("flip", on="b.gguf", at=9)
    with pytest.raises(DownloadError, match="checksum"):
        bench.file("b.gguf")
    assert "b.gguf" not in bench.published()


def test_a_login_page_is_not_a_model(bench: Bench) -> None:
    for method in ("GET", "HEAD"):
        bench.fault("html", on="/", method=method)
    with pytest.raises(DownloadError) as caught:
        bench.repo()
    assert "login page" in (caught.value.hint or "")
    assert bench.published() == []


def test_a_redirect_loop_ends(bench: Bench) -> None:
    bench.fault("loop", on="/", method="GET")
    with pytest.raises(DownloadError, match="TooManyRedirects"):
        bench.repo()
    bench.server.faults.clear()
    bench.fault("loop", on="/resolve/", method="HEAD")
    with pytest.raises(DownloadError, match="TooManyRedirects"):
        bench.repo()


@pytest.mark.parametrize("etag", ["abc", "W/123", "0" * 41, "z" * 64])
def test_a_file_without_a_checksum_is_refused(bench: Bench, etag: str) -> None:
    bench.server.repos["o/n"].etags["model.safetensors"] = etag
    with pytest.raises(DownloadError):
        bench.file("model.safetensors")


ODD_ETAGS = [
    "../../../../escaped",
    "..",
    ".",
    "",
    "a/../../../../../escaped",
    "a\\..\\escaped",
    "C:escaped",
    "x" * 300,
    "a b",
    'W/"../escaped',
]


@pytest.mark.parametrize("etag", [*ODD_ETAGS, "/{tmp}/escaped"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])  # in a HEAD, and in a list of files
def test_no_server_chooses_a_files_name(bench: Bench, name: str, etag: str, tmp_path: Path) -> None:
    """The library makes a blob, a lock and an unfinished file of any ETag."""
    (tmp_path / "a").mkdir()
    bench.server.repos["o/n"].etags[name] = etag.format(tmp=tmp_path)
    with pytest.raises(DownloadError) as caught:
        bench.repo()
    assert caught.value.field == "ETag"
    assert "HF_ENDPOINT" in (caught.value.hint or "")
    assert not list(tmp_path.parent.rglob("*escaped*"))
    assert name not in bench.published()
    assert not [s for s in bench.server.seen if s.method == "GET" and s.path.endswith(f"/{name}")]


def test_answers_are_looked_at_by_every_client_of_the_library(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes its client after some failures and makes another; and a person may have their own way to make one."""
    import huggingface_hub.utils._http as http

    made: list[Any] = []

    def own() -> Any:
        made.append(http.default_client_factory())
        return made[-1]

    monkeypatch.setattr(http, "_GLOBAL_CLIENT_FACTORY", http._GLOBAL_CLIENT_FACTORY)  # given back afterwards
    http.set_client_factory(own)
    bench.repo()
    assert len(made) == 1
    bench.server.repos["o/n"].commit = "f" * 40
    bench.server.repos["o/n"].etags["config.json"] = "../escaped"
    http.close_session()
    for _ in range(2):
        with pytest.raises(DownloadError) as caught:
            bench.repo()
        assert caught.value.field == "ETag"
    assert len(made) == 2
    assert len(made[1].event_hooks["response"]) == 1


@pytest.mark.parametrize("commit", ["../../../../escaped", "main", "", "0" * 39, "/escaped"])
def test_a_commit_that_is_none_is_refused(bench: Bench, commit: str, tmp_path: Path) -> None:
    bench.server.repos["o/n"].commit = commit
    with pytest.raises(DownloadError):
        bench.repo()
    assert not list(tmp_path.parent.rglob("escaped*"))


EVIL = [
    "../x",
    "../../x",
    "..",
    ".",
    "",
    "/x",
    "//x",
    "/etc/x",
    "a/../x",
    "a/../../x",
    "a//x",
    "./x",
    "..\\x",
    "..\\..\\x",
    "a\\..\\..\\x",
    "\\x",
    "\\\\host\\share\\x",
    "C:x",
    "C:\\x",
    "C:/x",
    "x\0y",
    "x\ny",
    "x\u202ey",
    "x:stream",
    "con|x",
    "x?",
]


@pytest.mark.parametrize("name", EVIL)
def test_a_name_cannot_leave_its_folder(bench: Bench, name: str, tmp_path: Path) -> None:
    for asked in (name, f"{name}.safetensors") if name else (name,):
        if asked not in ("...safetensors", "..safetensors"):
            with pytest.raises(RequestError):
                bench.file(asked)
    with pytest.raises(RequestError):
        bench.repo(revision=name or "..")
    # a repository that lists such a file: it is left out or refused, and nothing appears outside the cache
    before = _tree(tmp_path)
    bench.server.repos["o/n"].files[f"{name}.safetensors"] = b"evil"
    with suppress(DownloadError, StorageError):
        bench.repo()
    allowed = (bench.cache, tmp_path / "cutaway")
    assert [p for p in _tree(tmp_path) - before if not any(root in (p, *p.parents) for root in allowed)] == []


def _tree(folder: Path) -> set[Path]:
    return {*folder.rglob("*"), *folder.parent.glob("*")}


def test_names_that_differ_in_case_only_are_refused(bench: Bench) -> None:
    bench.server.repos["o/n"].files["Model.safetensors"] = b"other"
    with pytest.raises(DownloadError, match="case"):
        bench.repo()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gpt2", HubId("gpt2")),
        ("o/n", HubId("o/n")),
        ("o/n@main", HubId("o/n", "main")),
        ("o/n@refs/pr/3", HubId("o/n", "refs/pr/3")),
        (f"o/n@{'a' * 40}", HubId("o/n", "a" * 40)),
        ("o/n-1.5_b:Q4_K_M", HubId("o/n-1.5_b", select="Q4_K_M")),
        ("o/n:Q4_K_M@v1", HubId("o/n", "v1", select="Q4_K_M")),
        ("o/n/a b.gguf", HubId("o/n", file="a b.gguf")),
        ("o/n/sub/a.gguf@v2", HubId("o/n", "v2", "sub/a.gguf")),
    ],
)
def test_a_hub_name_is_taken_apart(text: str, parts: HubId) -> None:
    assert parse_id(text) == parts


@pytest.mark.parametrize(
    "text",
    ["", "/", "o/", "/n", "o//n", "o/n@", "o/n:", "o--x/n", "o/n..m", ".o/n", "o/n-", "o/n@../x",
     "o/n@a/../b", "o/n/../x", "o n", "o/n@a b", "http://h/o/n", "o\\n", "o/n\n", "o/n@a@b", "é/n", "o/" + "n" * 100],
)  # fmt: skip
def test_what_is_no_hub_name_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_id(text)


def test_two_revisions_are_one_too_many(bench: Bench) -> None:
    with pytest.raises(RequestError, match="two revisions"):
        hub.fetch_repo("o/n@v1", revision="main")
    with pytest.raises(RequestError):
        hub.fetch_repo("o/n:Q4")


def test_a_cache_that_cannot_be_written_says_so(bench: Bench) -> None:
    bench.cache.write_text("a file where the cache should be")
    with pytest.raises(StorageError):
        bench.repo()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Data processing error: File write: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_full_disk_is_no_fault_of_the_network(
    bench: Bench, error: Exception, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.file_download as file_download

    def full(*_: object, **__: object) -> None:
        if hidden:
            raise ConnectionError("something went wrong") from error
        raise error

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(StorageError) as caught:
        bench.repo()
    assert "free some space" in (caught.value.hint or "")
    assert bench.waits == []


def test_eight_processes_at_once(bench: Bench) -> None:
    code = "from cutaway.checkpoints import hub; print(hub.fetch_repo('o/n'))"
    env = {**os.environ, "HF_HUB_CACHE": str(bench.cache), "HF_ENDPOINT": bench.server.url}
    command = [sys.executable, "-c", code]
    pulls = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    folders = {pull.communicate(timeout=60)[0] for pull in pulls}
    assert [pull.returncode for pull in pulls] == [0] * 8
    assert len(folders) == 1
    assert (Path(folders.pop().strip()) / "model.safetensors").read_bytes() == WEIGHTS
    assert bench.litter() == []
    assert bench.server.count("GET", "agent-harnesses") == 0  # no telemetry
