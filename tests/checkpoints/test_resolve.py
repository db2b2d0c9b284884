"""What a model's name means, and what is refused."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cutaway.checkpoints import catalog, hub, wheel
from cutaway.checkpoints import resolve as module
from cutaway.checkpoints.resolve import Resolved, pull, resolve
from cutaway.errors import (
    CutawayError,
    DownloadError,
    FormatError,
    LimitExceeded,
    OfflineError,
    RequestError,
    UnsafeFormatError,
    UnsupportedModelError,
)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


hub_server = _load("hub_server")
Repo, COMMIT = hub_server.Repo, hub_server.COMMIT
DATA = b"GGUF and more"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a home with nothing in it."""
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import huggingface_hub.constants as constants
    import huggingface_hub.utils._http as http

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with hub_server.running() as running:
        for name in ("fetch_repo", "fetch_file", "list_files"):
            monkeypatch.setattr(hub, name, functools.partial(getattr(hub, name), endpoint=running.url))
        yield running
    http.close_session()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> catalog.CatalogEntry:
    """A catalogue of one."""
    entry = catalog.CatalogEntry(
        name="tiny",
        filename="tiny.gguf",
        sha256=hashlib.sha256(DATA).hexdigest(),
        size=len(DATA),
        licence="none",
        family="none",
        description="none",
        wheel=(catalog.WheelPart("carrier", "1.0", "m"),),
        default=True,
    )
    monkeypatch.setattr(catalog, "ENTRIES", (entry,))
    return entry


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Wheels that were asked for; they arrive at once."""
    names: list[str] = []

    def take(entry: catalog.CatalogEntry, **kwargs: Any) -> Path:
        if not catalog.is_here(entry):
            names.append(entry.name)
            catalog.path_of(entry).parent.mkdir(parents=True, exist_ok=True)
            catalog.path_of(entry).write_bytes(DATA)
        return catalog.path_of(entry)

    monkeypatch.setattr(wheel, "take", take)
    return names


def test_files_and_folders(place: Path) -> None:
    for name, kind in (("a.gguf", "gguf"), ("b.safetensors", "safetensors"), ("C.GGUF", "gguf")):
        (place / name).write_bytes(DATA)
        assert resolve(name) == Resolved(kind, Path(name), f"path:{name}")  # type: ignore[arg-type]
        assert resolve(place / name).path == place / name
    folder = place / "model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    assert resolve("model") == Resolved("folder", Path("model"), "path:model")
    assert pull("./model") == Path("model")


def test_the_home_sign_is_expanded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    (place / "a.gguf").write_bytes(DATA)
    assert resolve("~/a.gguf").path == place / "a.gguf"


def test_a_path_wins_over_a_name_and_a_name_over_the_hub(
    place: Path, tiny: catalog.CatalogEntry, taken: list[str]
) -> None:
    assert resolve("tiny") == Resolved("gguf", catalog.path_of(tiny), "catalogue:tiny")
    assert taken == ["tiny"]
    assert pull("tiny") == catalog.path_of(tiny)
    assert taken == ["tiny"]  # it was here
    (place / "tiny").mkdir()
    (place / "tiny" / "model.safetensors").touch()
    assert resolve("tiny").origin == "path:tiny"
    with pytest.raises(RequestError):  # a Path never names a catalogue entry
        resolve(Path("smollm2"))


def test_the_catalogue_offline(tiny: catalog.CatalogEntry) -> None:
    with pytest.raises(OfflineError, match=r"tiny\.gguf"):
        resolve("tiny", offline=True)
    catalog.path_of(tiny).parent.mkdir(parents=True)
    catalog.path_of(tiny).write_bytes(DATA)
    assert resolve("tiny", offline=True).path == catalog.path_of(tiny)


def test_a_catalogue_file_may_come_from_the_hub(
    server: Any, tiny: catalog.CatalogEntry, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repos["o/n"] = Repo({"t.gguf": DATA})
    values = {name: getattr(tiny, name) for name in tiny.__slots__}
    entry = catalog.CatalogEntry(**(values | {"hub": catalog.HubFile("o/n", "t.gguf", COMMIT)}))
    monkeypatch.setattr(catalog, "ENTRIES", (entry,))
    assert resolve("tiny").path.read_bytes() == DATA
    assert taken == []
    server.repos["o/n"] = Repo({"t.gguf": b"something else"}, commit="f" * 40)
    entry = catalog.CatalogEntry(**(values | {"hub": catalog.HubFile("o/n", "t.gguf", "f" * 40)}))
    monkeypatch.setattr(catalog, "ENTRIES", (entry,))
    assert resolve("tiny").path == catalog.path_of(entry)  # not the file that is meant: out of the wheel instead
    assert taken == ["tiny"]
    entry = catalog.CatalogEntry(**(values | {"hub": entry.hub, "wheel": ()}))
    monkeypatch.setattr(catalog, "ENTRIES", (entry,))
    catalog.path_of(entry).unlink()
    with pytest.raises(DownloadError, match="sha256"):
        resolve("tiny")


@pytest.mark.parametrize(
    "name", ["missing.gguf", "./missing", "/nowhere/at/all", "~/missing", "a\\b", "dir/missing.safetensors", "../x"]
)
def test_a_missing_path_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(RequestError, match="no such file") as caught:
        resolve(name)
    assert "tried" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "name", ["", "a b", "o/n@", "o//n", "http://h/m", "x" * 5000, "o/n/README.md", "o/n/a.gguf:Q4"]
)
def test_a_name_that_means_nothing(name: str) -> None:
    with pytest.raises(RequestError):
        resolve(name)
    for wrong in (None, 3, b"\xff"):
        with pytest.raises(RequestError):
            resolve(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="NUL"):
        resolve("a\0b")


def test_a_revision_belongs_to_a_hub_id(place: Path, tiny: catalog.CatalogEntry) -> None:
    (place / "a.gguf").touch()
    for name in ("a.gguf", "tiny", "./missing", "o/n@other"):
        with pytest.raises(RequestError, match="revision"):
            resolve(name, revision="main")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".PT"])
def test_pickles_are_refused_and_never_opened(suffix: str, place: Path) -> None:
    file = place / f"pytorch_model{suffix}"
    file.write_bytes(b"\x80\x04.")
    opened: list[str] = []
    _watch(opened)
    for name in (file.name, str(file), f"o/n/model{suffix}", f"missing{suffix}"):
        with pytest.raises(UnsafeFormatError) as caught:
            resolve(name)
        assert "safetensors" in (caught.value.hint or "")
    with pytest.raises(UnsafeFormatError, match="pytorch_model"):
        resolve(place)
    _watched.clear()
    assert not any(file.name in path for path in opened)


_watched: list[list[str]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _watched:
        _watched[0].append(str(args[0]))


def _watch(into: list[str]) -> None:
    if not getattr(_watch, "installed", False):
        sys.addaudithook(_audit)  # cannot be taken out again: it listens only while somebody watches
        _watch.installed = True  # type: ignore[attr-defined]
    _watched.append(into)


def test_folders_that_hold_no_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = place / "empty"
    empty.mkdir()
    with pytest.raises(UnsupportedModelError):
        resolve(empty)
    (empty / "config.json").touch()
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        resolve(empty)
    (empty / "one.gguf").touch()
    assert resolve(empty) == Resolved("gguf", empty / "one.gguf", f"path:{empty}")
    (empty / "two.gguf").touch()
    with pytest.raises(RequestError, match="several") as caught:
        resolve(empty)
    assert "one, two" in (caught.value.hint or "")
    (empty / "model.safetensors").touch()
    assert resolve(empty).kind == "folder"
    monkeypatch.setattr(module, "_MOST_FILES", 2)
    with pytest.raises(LimitExceeded):
        resolve(empty)


@pytest.mark.skipif(os.name == "nt", reason="POSIX files")
def test_odd_files(place: Path) -> None:
    os.mkfifo(place / "pipe.gguf")
    (place / "loop.gguf").symlink_to("loop.gguf")
    (place / "gone.gguf").symlink_to("nowhere")
    (place / "words.txt").touch()
    (place / "dir.gguf").mkdir()
    for name, kind in (
        ("pipe.gguf", FormatError),
        ("loop.gguf", FormatError),
        ("gone.gguf", RequestError),
        ("words.txt", UnsupportedModelError),
        ("dir.gguf", UnsupportedModelError),
        ("/dev/null", FormatError),
        ("words.txt/x", RequestError),
    ):
        with pytest.raises(CutawayError) as caught:
            resolve(name if "/" not in name or name[0] == "/" else f"./{name}")
        assert isinstance(caught.value, kind), name


def test_hub_folders(server: Any) -> None:
    server.repos["o/n"] = Repo({"config.json": b"{}", "model.safetensors": b"w", "x.Q4_K_M.gguf": DATA})
    for name in ("o/n", "o/n@v1", f"o/n@{COMMIT}"):
        found = resolve(name)
        assert found.kind == "folder"
        assert found.origin == f"hub:o/n@{COMMIT}"
        assert not (found.path / "x.Q4_K_M.gguf").exists()
    assert resolve("o/n", revision="v1") == found == resolve("o/n", offline=True)
    assert resolve("o/n:Q4_K_M").path.read_bytes() == DATA


def test_hub_ggufs(server: Any) -> None:
    files = {f"m.{kind}.gguf": kind.encode() for kind in ("Q4_K_M", "Q4_K_S", "Q8_0", "IQ4_K_M")}
    files |= {f"big-Q6_K-0000{n}-of-00002.gguf": b"%d" % n for n in (1, 2)}
    server.repos["o/n"] = Repo(files | {"mmproj-Q8_0.gguf": b"eyes", "README.md": b"words", "sub/deep.gguf": b"deep"})
    found = resolve("o/n:q4_k_m")
    assert (found.kind, found.path.read_bytes(), found.origin) == ("gguf", b"Q4_K_M", f"hub:o/n@{COMMIT}")
    assert resolve("o/n/m.Q8_0.gguf").path.read_bytes() == b"Q8_0" == resolve("o/n:Q8_0").path.read_bytes()
    assert resolve("o/n/sub/deep.gguf@v1") == Resolved(
        "gguf", found.path.parent / "sub" / "deep.gguf", f"hub:o/n@{COMMIT}"
    )
    parts = resolve("o/n:Q6_K").path
    assert parts.name == "big-Q6_K-00001-of-00002.gguf"
    assert (parts.parent / "big-Q6_K-00002-of-00002.gguf").read_bytes() == b"2"
    assert resolve("o/n:Q6_K", offline=True).path == parts
    for name, says in (("o/n", "several"), ("o/n:Q2_K", "no .gguf"), ("o/n:Q4", "no .gguf"), ("o/n:m", "several")):
        with pytest.raises(RequestError, match=says) as caught:
            resolve(name)
        assert "m.Q8_0" in (caught.value.hint or "")
    with pytest.raises(DownloadError) as absent:
        resolve("o/n/m.Q3.gguf")
    assert "m.Q8_0.gguf" in (absent.value.hint or "")


def test_a_single_gguf_needs_no_choice(server: Any) -> None:
    server.repos["o/n"] = Repo({"only.gguf": DATA, "config.json": b"{}"})
    assert resolve("o/n").path.name == "only.gguf"
    assert resolve("o/n", offline=True).path.name == "only.gguf"


def test_hub_repositories_without_a_model(server: Any) -> None:
    server.repos["o/pickle"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"p"})
    with pytest.raises(UnsafeFormatError, match="pytorch_model"):
        resolve("o/pickle")
    assert server.count("GET", "pytorch_model") == 0
    server.repos["o/none"] = Repo({"README.md": b"words"})
    with pytest.raises(UnsupportedModelError, match="README"):
        resolve("o/none")


def test_a_mistyped_name_hears_what_was_tried(server: Any) -> None:
    with pytest.raises(DownloadError, match="404") as caught:
        resolve("smolm2")
    assert "did you mean smollm2?" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", " ", "\t\n", "\u3000"])
def test_a_blank_name_is_no_model(text: str) -> None:
    with pytest.raises(RequestError, match="name is empty"):
        resolve(text)
    with pytest.raises(RequestError, match="revision is empty"):
        resolve("owner/name", revision=text)
