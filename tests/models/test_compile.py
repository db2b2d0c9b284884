"""Runs ``compile_checks.py`` without the shape checks that the other tests put around every function.

The compiler cannot look through those, and they cannot be taken off again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def checks(marked: str) -> None:
    """Run those with or without a mark."""
    quiet = ["--noconftest", "-pno:cacheprovider", "-pno:logging", "-Wignore"]
    command = [sys.executable, "-m", "pytest", *quiet, "-m", marked, str(HERE / "compile_checks.py")]
    run = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


def test_graphs() -> None:
    checks("not slow")


@pytest.mark.slow
def test_through_the_real_compiler() -> None:
    checks("slow")
