"""Write docs/inside.md: run every block of benchmarks/inside_source.md, and put what it printed below it.

    python -m benchmarks.inside [OUT]

Blocks of Python share one namespace, in order. Lines that begin with ``$ cutaway`` are run as they are.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import cutaway

HERE = Path(__file__).parent
SOURCE, OUT = HERE / "inside_source.md", HERE.parent / "docs" / "inside.md"
BLOCK = re.compile(r"```(python|console)\n(.*?)```\n", re.DOTALL)
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
COLUMNS = "80"


def written(source: str) -> str:
    """The page: each block, and what it printed."""
    space: dict[str, Any] = {"__name__": "inside"}
    exec_ = {"python": lambda block: _python(block, space), "console": _console}

    def run(found: re.Match[str]) -> str:
        printed = exec_[found[1]](found[2])
        print(found[2].splitlines()[0], file=sys.stderr)
        shown = f"\n```text\n{printed.rstrip()}\n```\n" if printed.strip() else ""
        return f"```{found[1]}\n{found[2]}```\n{shown}"

    return BLOCK.sub(run, source)


def _python(block: str, space: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(ast.parse(block), "inside.md", "exec"), space)  # noqa: S102  # our own page, on our own machine
    return out.getvalue()


def _console(block: str) -> str:
    printed = []
    for line in block.splitlines():
        words = shlex.split(line.removeprefix("$ "))
        assert words[0] == "cutaway", line
        env = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1"}
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    return "\n".join(printed)


@contextlib.contextmanager
def _here() -> Any:
    """A folder of its own, and MiniLM where tests have it, if they have."""
    load, folder = cutaway.load, Path(os.environ.get("CUTAWAY_TEST_MODELS", "")) / "minilm"
    os.environ["COLUMNS"] = COLUMNS
    old = Path.cwd()
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        try:
            if folder.exists():
                cutaway.load = lambda name, **more: load(folder if name == MINILM else name, **more)
            yield
        finally:
            cutaway.load = load
            os.chdir(old)


def main() -> None:
    """Run everything."""
    out = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else OUT
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    with _here():
        text = written(SOURCE.read_text())
    out.write_text(text)


if __name__ == "__main__":
    main()
