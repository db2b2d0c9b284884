"""Runs ``untapped_checks.py`` without the shape checks that the other tests put around every function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_nobody_looking_costs_nothing() -> None:
    quiet = ["--noconftest", "-pno:cacheprovider", "-pno:logging", "-Wignore"]
    command = [sys.executable, "-m", "pytest", *quiet, str(HERE / "untapped_checks.py")]
    run = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
