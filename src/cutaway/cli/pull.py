"""``cutaway pull``: fetch a model."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings, find
from cutaway.cli.options import complete_model, shared
from cutaway.cli.text import nbytes


@click.command("pull")
@click.argument("name", shell_complete=complete_model)
@shared("find", "output")
def command(settings: Settings, /, name: str) -> None:
    """Fetch the model NAME, unless it is here, and print where it is.

    NAME is a catalogue name (see `cutaway models`), or a hub id: owner/name, owner/name@revision,
    owner/name/file.gguf, owner/name:Q4_K_M.
    """
    resolved = find(settings, name)
    path = resolved.path
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    size = sum(file.stat().st_size for file in files)
    if settings.json:
        facts = {"name": name, "path": str(path), "origin": resolved.origin, "kind": resolved.kind, "bytes": size}
        settings.emit_json(facts)
        return
    settings.detail(f"{resolved.origin}: {nbytes(size)}")
    settings.emit(f"{path}\n")
