"""What the README shows, done."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import torch

import cutaway

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(*arguments: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_build_your_own(tmp_path: Path) -> None:
    """The recipe, and the lines under it, in a folder of their own."""
    (recipe,) = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(recipe)
    (lines,) = [block for block in blocks("python") if "cutaway.build" in block]
    *before, last = [line.split("  #")[0].strip() for line in lines.splitlines()]
    (tmp_path / "lines.py").write_text("\n".join(["import cutaway", *before, f"print({last})"]))
    assert run("lines.py", folder=tmp_path) == "True\n"

    model, again = cutaway.build(tmp_path / "mine.yaml", seed=0), cutaway.load(tmp_path / "mine")
    for name, tensor in model.transformer.state_dict().items():
        assert torch.equal(tensor, again.transformer.state_dict()[name])
    assert [layer.attention.mask.window for layer in again.spec.decoder.layers] == [32, 32, None, 32, 32, None]
    drawn = run("-m", "cutaway", "show", "mine", folder=tmp_path)
    for words in ("layers 0-1, 3-4", "window 32", "ALiBi", "relu2", "RMS norm after", "post_norm"):
        assert words in drawn.replace("–", "-"), words


def test_every_line_of_python_parses() -> None:
    for block in blocks("python"):
        ast.parse(block.replace("…", "..."))
