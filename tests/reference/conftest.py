"""Checkpoints written once a session, and a table of what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutaway.checkpoints.load import load_checkpoint
from cutaway.checkpoints.resolve import Resolved
from cutaway.models import Transformer
from tests.reference import oracle, tiny

MEASURED: pytest.StashKey[dict[tuple[str, str], float]] = pytest.StashKey()


def open_folder(folder: Path) -> Transformer:
    """Ours, from a folder."""
    return load_checkpoint(Resolved("folder", folder, f"path:{folder}")).transformer


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A case's name to the folder that transformers wrote for it."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tiny.write(tiny.config(name), tmp_path_factory.mktemp("tiny") / name)
        return made[name]

    return find


@pytest.fixture(scope="session")
def capped_oracle() -> Any:
    """Gemma 3's caps and MPT's scales, for the whole session: the settings change nothing in all other cases."""
    with pytest.MonkeyPatch.context() as patch:
        oracle.use_attention_cap(patch)
        oracle.use_mpt_settings(patch)
        yield


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, str, float], float]:
    """Note the largest difference seen for a row and a column of the table."""
    table = request.config.stash.setdefault(MEASURED, {})

    def note(row: str, column: str, value: float) -> float:
        table[row, column] = max(value, table.get((row, column), 0.0))
        return value

    return note


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table, and leave it as JSON where CUTAWAY_MEASURED says."""
    import os

    table = config.stash.get(MEASURED, {})
    if not table:
        return
    columns = sorted({column for _, column in table})
    terminalreporter.write_sep("-", "largest differences from the reference")
    width = max(len(row) for row, _ in table)
    terminalreporter.write_line(" " * width + "".join(f"  {column:>12}" for column in columns))
    for row in dict.fromkeys(row for row, _ in table):
        cells = [f"{table[row, column]:.1e}" if (row, column) in table else "" for column in columns]
        terminalreporter.write_line(f"{row:<{width}}" + "".join(f"  {cell:>12}" for cell in cells))
    if path := os.environ.get("CUTAWAY_MEASURED"):
        nested: dict[str, dict[str, float]] = {}
        for (row, column), value in table.items():
            nested.setdefault(row, {})[column] = value
        Path(path).write_text(json.dumps(nested, indent=2) + "\n")
