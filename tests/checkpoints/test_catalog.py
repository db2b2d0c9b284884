"""The catalogue: one name is one file with one sha256."""

from __future__ import annotations

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from cutaway.checkpoints import catalog, home
from cutaway.checkpoints.catalog import ENTRIES, CatalogEntry, HubFile, WheelPart, is_here, lookup, path_of
from cutaway.checkpoints.progress import show_progress
from cutaway.errors import ConfigError, RequestError


def test_one_name_is_one_file_with_one_checksum() -> None:
    for of in ("name", "filename", "sha256"):
        values = [getattr(entry, of) for entry in ENTRIES]
        assert len(set(values)) == len(values)
    for entry in ENTRIES:
        assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]*", entry.name)
        assert entry.licence
        assert entry.family
        assert entry.description
    assert [entry.name for entry in ENTRIES if entry.default] == ["smollm2"]
    assert catalog.default().licence == "Apache-2.0"


def test_parts_are_in_order() -> None:
    parts = lookup("gemma3-270m").wheel
    assert [part.project[-5:] for part in parts] == ["part1", "part2", "part3", "part4"]
    assert [part.member[-6:] for part in parts] == ["part00", "part01", "part02", "part03"]
    assert len({part.version for part in parts}) == 1


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm"])
def test_an_unknown_name_brings_the_nearest(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        lookup(name)
    assert "smollm2" in (caught.value.hint or "")
    with pytest.raises(RequestError) as caught:
        lookup("zzz")
    assert "gemma3-270m" in (caught.value.hint or "")


@pytest.mark.parametrize("filename", ["../x", "a/b", "a\\b", "C:x", "", ".hidden", ".."])
def test_a_file_has_one_plain_name(filename: str) -> None:
    part = WheelPart("p", "1", "m")
    with pytest.raises(ConfigError):
        CatalogEntry(
            name="n", filename=filename, sha256="0", size=1, licence="", family="", description="", wheel=(part,)
        )
    with pytest.raises(ConfigError):
        CatalogEntry(name="n", filename="f", sha256="0", size=1, licence="", family="", description="")
    CatalogEntry(
        name="n",
        filename="f",
        sha256="0",
        size=1,
        licence="",
        family="",
        description="",
        hub=HubFile("o/n", "f", "main"),
    )


def test_home_is_where_the_person_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert home.home() == tmp_path / "a"
    assert path_of(lookup("smollm2")).parent == home.models_dir() == tmp_path / "a" / "models"
    assert not is_here(lookup("smollm2"))
    monkeypatch.delenv("CUTAWAY_HOME")
    assert home.home() == tmp_path / "b" / "cutaway"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert home.home() == tmp_path / "c" / ".cache" / "cutaway"


@pytest.mark.parametrize(("value", "off"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_offline_is_asked_for_or_set(value: str, off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert home.is_offline() is off
    assert home.is_offline(True)


def test_importing_is_light() -> None:
    code = (
        "import sys; import cutaway.checkpoints.resolve, cutaway.checkpoints.progress; "
        "print([m for m in ('torch', 'huggingface_hub', 'rich', 'numpy', 'httpx2') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_lines_a_bar_or_nothing() -> None:
    now = iter([0.0, 1.0, 2.0, 6.0, 6.5, 7.0])
    out = StringIO()
    with show_progress(stream=out, interval=5.0, clock=lambda: next(now)) as report:
        for done in (0, 1, 2, 3):
            report(done << 20, 4 << 20, "file")
        report(0, 0, "other [red]")
        report(4 << 20, 4 << 20, "file")
    assert out.getvalue().splitlines() == [
        "file: 0 B of 4.0 MiB (0 %)",
        "file: 3.0 MiB of 4.0 MiB (75 %)",
        "other [red]: 0 B",
        "file: 4.0 MiB of 4.0 MiB (100 %)",
    ]
    silent = StringIO()
    with show_progress(True, stream=silent) as report:
        report(1, 2, "file")
    assert silent.getvalue() == ""
    terminal = _Terminal()
    with show_progress(stream=terminal) as report:
        report(1, 2, "file [red]")
    assert "file [red]" in terminal.getvalue()


def test_a_bar_has_a_name_before_anything_is_reported() -> None:
    terminal = _Terminal()
    with show_progress(label="loading [bold]this", stream=terminal):
        pass
    assert "loading [bold]this" in terminal.getvalue()
