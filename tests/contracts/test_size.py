"""The numbers of docs/architecture.md's section "Size" are those of the sources, within a tenth."""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from functools import cache
from pathlib import Path

import pytest

import cutaway
from cutaway.families.registry import _FILES

SRC = Path(cutaway.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
EMPTY = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines that are not blank, not only a comment, and not of a docstring."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    prose = [node.value for node in statements if isinstance(node.value, ast.Constant)]
    said = {line for node in prose if isinstance(node.value, str) for line in range(node.lineno, node.end_lineno + 1)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in EMPTY]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - said)


def counted(files: list[Path]) -> tuple[int, int]:
    """(code lines, all lines)."""
    sources = [path.read_text() for path in files]
    return sum(map(code_lines, sources)), sum(len(source.splitlines()) for source in sources)


@cache
def sizes() -> dict[str, tuple[float, float]]:
    """The table's rows: how it begins → (code lines, all lines)."""
    families = {f"{name}.py": counted([SRC / "families" / f"{name}.py"]) for name in sorted({*_FILES.values()})}
    largest = max(families, key=lambda name: families[name])
    code, total = zip(*families.values(), strict=True)
    modules, models = ([*(SRC / room).rglob("*.py")] for room in ("modules", "models"))
    return {
        "`modules/`": counted(modules),
        "`models/`": counted(models),
        "together": counted(modules + models),
        "a family's file, median": (statistics.median(code), statistics.median(total)),
        f"the largest, `{largest}`": families[largest],
        "all of `src/cutaway`": counted([*SRC.rglob("*.py")]),
    }


@pytest.mark.parametrize("row", range(6))
def test_the_page_is_not_stale(row: int) -> None:
    name, now = [*sizes().items()][row]
    section = PAGE.partition("\n## Size\n")[2].partition("\n## ")[0]
    stated = re.search(rf"^\| {re.escape(name)} \| ([\d,]+) \| ([\d,]+) \|$", section, re.M)
    right = f"| {name} | {now[0]:,.0f} | {now[1]:,.0f} |"
    assert stated, f"docs/architecture.md, Size, has no such row: {right}"
    for number, true in zip(stated.groups(), now, strict=True):
        assert abs(int(number.replace(",", "")) - true) <= 0.1 * true, f"docs/architecture.md, Size, is stale: {right}"


def test_code_lines() -> None:
    source = '''"""A docstring
of two lines."""

import io  # counted

# not counted
TEXT = """counted

three times"""


def f(
    x,
):
    """No."""
    return x
'''
    assert code_lines(source) == 1 + 3 + 3 + 1
