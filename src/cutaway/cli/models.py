"""``cutaway models``: the catalogue, and what of it is here."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings
from cutaway.cli.options import shared
from cutaway.cli.text import Cell, nbytes, table


@click.command("models")
@shared("lines")
def command(settings: Settings, /) -> None:
    """List the models that have a short name.

    Any other model goes by its hub id (owner/name), its folder, or its .gguf file.
    """
    from cutaway.checkpoints.catalog import ENTRIES, is_here, path_of

    if settings.json or settings.jsonl:
        entries = [
            {
                "name": entry.name,
                "family": entry.family,
                "bytes": entry.size,
                "licence": entry.licence,
                "description": entry.description,
                "default": entry.default,
                "here": is_here(entry),
                "path": str(path_of(entry)),
                "sha256": entry.sha256,
            }
            for entry in ENTRIES
        ]
        settings.emit_json(entries if settings.jsonl else {"models": entries})
        return
    look = settings.look
    rows: list[list[str | Cell]] = [[Cell(word, "dim") for word in ("name", "family", "size", "licence", "here")]]
    for entry in ENTRIES:
        name = f"{entry.name} (default)" if entry.default else entry.name
        here = Cell("yes", "green") if is_here(entry) else Cell("no", "dim")
        rows.append([Cell(name, "bold"), entry.family, nbytes(entry.size), entry.licence, here])
    lines = table(rows, "llrll", look, gives=3)
    missing = [entry.name for entry in ENTRIES if not is_here(entry)]
    lines += ["", *(f"{path_of(entry)}" for entry in ENTRIES if is_here(entry))]
    if missing:
        lines.append(look.paint(f"cutaway pull {missing[0]}  fetches one that is not here", "dim"))
    settings.emit("\n".join(lines) + "\n")
