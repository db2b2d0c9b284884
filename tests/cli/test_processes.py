"""What only a process of its own shows: pipes, signals, and two at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
