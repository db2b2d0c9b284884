"""Each room imports only from rooms to its left."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoints import gguf_models

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


# What a GGUF and a text do without, packages and rooms of our own.
LATE = """
jinja2 safetensors huggingface_hub transformers llguidance
cutaway.checkpoints.folder cutaway.checkpoints.gguf_save cutaway.checkpoints.hub cutaway.checkpoints.quantised
cutaway.checkpoints.recipe cutaway.checkpoints.save cutaway.checkpoints.wheel cutaway.cli cutaway.formats.gguf_write
cutaway.formats.mixes cutaway.generation.batch_file cutaway.generation.beam cutaway.generation.draft
cutaway.generation.saved cutaway.generation.score cutaway.inside cutaway.inspection cutaway.models.init
cutaway.tasks.batch cutaway.tokenizers.load cutaway.tokenizers.protobuf cutaway.tokenizers.sandbox
cutaway.tokenizers.save
"""


def test_a_first_token_imports_only_what_it_needs(tmp_path: Path) -> None:
    """Loading a GGUF that has a chat template, and completing a text, wait for nothing else."""
    model, path = gguf_models.model("qwen3"), tmp_path / "small.gguf"
    assert model.tokenizer is not None
    assert model.tokenizer.chat_template is not None
    cutaway.save(model, path, format="gguf")
    code = f"""
import sys, torch, tokenizers
before = set(sys.modules)
import cutaway
cutaway.load({str(path)!r}).generate("and", max_tokens=2, temperature=0)
print(*sorted(set({LATE.split()!r}) & (set(sys.modules) - before)))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == ""


def test_what_is_late_is_there() -> None:
    """A name that nobody has any more would never be imported."""
    ours = {".".join(["cutaway", *path.relative_to(SRC).with_suffix("").parts]) for path in FILES}
    rooms = {name.removesuffix(".__init__") for name in ours}
    assert {name for name in LATE.split() if name.startswith("cutaway")} <= rooms


def test_spec_has_no_torch() -> None:
    for path in (SRC / "spec").glob("*.py"):
        assert "import torch" not in path.read_text()
