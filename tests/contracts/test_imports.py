"""Each room imports only from rooms to its left."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cutaway

SRC = Path(cutaway.__file__).parent
# Room → the rooms it may import, besides itself. Drawn in docs/architecture.md.
LEFT: dict[str, set[str]] = {
    "errors": set(),
    "look": set(),
    "collecting": set(),
    "shapes": set(),
    "spec": {"errors"},
    "cache": {"errors", "shapes", "spec"},
    "kernels": {"errors", "shapes", "spec", "cache"},
    "modules": {"errors", "shapes", "spec", "cache", "kernels"},
    "models": {"errors", "shapes", "spec", "cache", "kernels", "modules"},
    "formats": {"errors", "spec"},
    "families": {"errors", "spec", "formats"},
}
LEFT["checkpoints"] = {*LEFT} - {"look", "collecting"}
LEFT["tokenizers"] = {*LEFT["checkpoints"], "checkpoints"}
LEFT["generation"] = {*LEFT["tokenizers"], "tokenizers"}
LEFT["inspection"] = {*LEFT["generation"], "generation", "look"}
LEFT["tasks"] = {*LEFT["generation"], "generation"}
LEFT["inside"] = {*LEFT["inspection"], "inspection"}
LEFT["edits"] = {*LEFT["inside"]}
LEFT["model"] = {*LEFT["inside"], "inside", "tasks"}
LEFT["store"] = {*LEFT["model"], "model", "collecting"}
LEFT["measure"] = {*LEFT["inspection"], "model"}
LEFT["cli"] = {*LEFT["store"], "store", "measure", "edits"}


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported(path: Path) -> set[tuple[str, int]]:
    """Rooms that a file imports, functions and type-checking blocks included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {(name.split(".")[1], node.lineno) for name in names if name.startswith("cutaway.")}
    return found


FILES = [path for path in sorted(SRC.rglob("*.py")) if room(path) not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_arrows_point_left(path: Path) -> None:
    for target, line in imported(path):
        if (SRC / target).is_dir() or (SRC / f"{target}.py").exists():
            assert target == room(path) or target in LEFT[room(path)], f"{path}:{line} imports {target}"


def test_every_room_is_drawn() -> None:
    assert {room(path) for path in FILES} <= set(LEFT)


HEAVY = ("torch", "numpy", "transformers", "tokenizers", "huggingface_hub")


@pytest.mark.parametrize("statement", ["import cutaway", "import cutaway.spec", "from cutaway.cli.main import main"])
def test_light_imports(statement: str) -> None:
    """`import cutaway`, the spec and the command line's root bring in nothing heavy."""
    code = f"import sys; {statement}; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_spec_has_no_torch() -> None:
    for path in (SRC / "spec").glob("*.py"):
        assert "import torch" not in path.read_text()
