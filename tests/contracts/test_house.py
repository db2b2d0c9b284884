"""Habits of the house that a machine can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import cutaway

SRC = Path(cutaway.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
LONGEST = 300


def test_public_names() -> None:
    """`__all__` is sorted, complete, and everything in it can be had."""
    assert cutaway.__all__ == sorted(cutaway.__all__)
    assert set(cutaway._WHERE) | {"__version__"} == set(cutaway.__all__)
    for name in cutaway.__all__:
        assert getattr(cutaway, name) is not None
    assert set(cutaway.__all__) <= set(dir(cutaway))


def test_errors_are_one_tree() -> None:
    """Every error class is drawn in the docstring, and descends from the root."""
    import cutaway.errors as errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), cutaway.CutawayError)
        assert re.search(rf"\b{name}\b", errors.__doc__ or "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_a_file_is_one_idea(path: Path) -> None:
    """Past about 300 lines a file holds two. The facade, whose docstrings are the public reference, may be longer."""
    most = 400 if path.name == "model.py" and path.parent == SRC else LONGEST + 15
    assert len(path.read_text().splitlines()) <= most


def _public(tree: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    found: list[ast.FunctionDef | ast.ClassDef] = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            found.append(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_public_things_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.read_text().strip():
        assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in _public(tree):
        assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name}"


def _calls(path: Path) -> list[tuple[str, int]]:
    """(dotted name, line) of every call in a file."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [(ast.unparse(call.func), call.lineno) for call in calls]


FORBIDDEN = ("eval", "exec", "compile", "hasattr", "__import__", "torch.load", "os.system")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_nothing_runs_what_it_reads(path: Path) -> None:
    """No pickle, no eval, no asking what an object happens to have."""
    bad = (*FORBIDDEN, "pickle.", "marshal.")
    hits = [(name, line) for name, line in _calls(path) if name in bad or name.startswith(bad[-2:])]
    assert not hits, f"{path}: {hits}"
    assert not re.search(r"^\s*(import|from) (pickle|marshal|dill|shelve)", path.read_text(), re.M)


def test_one_template_environment() -> None:
    """Templates are rendered by one subclass of jinja2's sandbox, and by nothing else."""
    made = [(path.name, name) for path in FILES for name, _ in _calls(path) if name.endswith("Environment")]
    classes = [
        (path.name, ast.unparse(base))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if ast.unparse(base).endswith("Environment")
    ]
    assert made == []
    assert classes == [("sandbox.py", "ImmutableSandboxedEnvironment")]
