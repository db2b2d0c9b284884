"""Where a new model may be written: not over the one that is read, and over another only where that is said."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cutaway.errors import RequestError, StorageError

_FOREIGN = (".safetensors", ".bin", ".pt", ".pth", ".onnx", ".ggml", ".json", ".txt", ".zip", ".tar", ".gz", ".yaml")
_PIECE = re.compile(r"(.+-)\d{5}(-of-\d{5}\.gguf)")


def is_gguf(out: str) -> bool:
    """Whether a name asks for one file rather than for a folder.

    Raises:
        RequestError: neither is written by such a name.
    """
    if out == "-":
        what, hint = "a model is not written to standard output", "name it OUT.gguf, or a folder"
        raise RequestError(what, field="--out", expected=".gguf", got=out, hint=hint)
    endings = [ending.lower() for ending in Path(out).suffixes]
    if endings[-1:] == [".gguf"]:
        return True
    if ".gguf" in endings or (endings and endings[-1] in _FOREIGN):
        hint = "name it OUT.gguf, or a folder without such an ending"
        raise RequestError("blocks are not written as such a file", field="--out", expected=".gguf", got=out, hint=hint)
    return False


def check_place(source: Path, out: Path, gguf: bool, replace: bool) -> None:
    """Refuse, before anything is read, what could not be written or would be lost.

    Args:
        source: the model that is read: a file, or a folder.
        out: where the new one is to be.
        gguf: as one file.
        replace: whether another model that is there may go.

    Raises:
        RequestError: the model that is read would be replaced, something else than a model, or one that was not to be.
        StorageError: nothing can be written there.
    """
    real = Path(os.path.realpath(out))
    kept = [source.resolve() if source.is_dir() else source.resolve().parent, *_files(source)]
    # A folder that contains the input is written to where that lies: its config and weights are replaced, or go.
    within = not gguf and any(path.is_relative_to(real) for path in (kept[0], Path(os.path.abspath(source))))
    if within or (out.exists() and any(path.exists() and os.path.samefile(path, out) for path in kept)):
        hint = "what is rounded away cannot be had again: give another name, and remove the old one afterwards"
        raise RequestError("would replace the model that is read", field="--out", got=str(out), hint=hint)
    if not gguf and out.is_dir() and any(out.iterdir()) and not (out / "config.json").exists():
        hint = "give the name of a new folder, or OUT.gguf"
        raise RequestError("there are other things than a model", field="--out", got=str(out), hint=hint)
    there = out.is_file() if gguf else out.is_dir() and any(out.iterdir())
    if there and not replace:
        hint = "give another name, or --replace"
        raise RequestError("there is a model already", field="--out", got=str(out), hint=hint)
    _try(out, real, gguf)


def _files(source: Path) -> Iterator[Path]:
    """All that the model is read from."""
    if source.is_dir():
        yield from (path for path in source.rglob("*") if path.is_file())
        return
    yield source
    if (found := _PIECE.fullmatch(source.name)) is not None:
        yield from source.parent.glob(f"{_literal(found[1])}?????{_literal(found[2])}")


def _literal(name: str) -> str:
    """A pattern that means this very name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _try(out: Path, real: Path, gguf: bool) -> None:
    """Write nothing to where the model will be."""
    folder = real.parent if gguf else real
    while not gguf and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if out.exists() and out.is_dir() == gguf:
            raise StorageError("is a directory" if gguf else "is no directory", path=out)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError("cannot be written", path=out, got=error.strerror or repr(error)) from error
