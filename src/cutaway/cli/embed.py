"""``cutaway embed``: texts as vectors."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import click

from cutaway.cli.common import Settings, load_model
from cutaway.cli.kinds import check_able
from cutaway.cli.options import COUNT, shared
from cutaway.cli.text import Cell, Look, table, width
from cutaway.cli.texts import SENTENCES, model_of_kind, reading, shown_text, texts_arguments

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 6  # numbers of a vector that a terminal shows, at most
_NUMBER = 8  # columns of one
_LABEL = 12  # least columns of a text beside its cosines
_TABLE, _MOST = 24, 1000  # texts whose cosines are shown with each other; with the nearest alone


@click.command("embed")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--pool", type=click.Choice(["mean", "cls", "last", "max"]), help="How. [the checkpoint's own, or mean]")
@click.option("--normalize/--no-normalize", default=None, help="Bring vectors to length one. [the checkpoint's own]")
@click.option("--prompt", metavar="NAME", help="A text of the checkpoint's to put before each.")
@click.option("--batch", type=COUNT, metavar="N", help="Texts to read at once. [what fits into 8,192 tokens]")
@click.option(
    "--format", "kind", type=click.Choice(["json", "npy"]), help="npy: one array, for a pipe, or --out NAME.npy."
)
@shared("sentences", "load", "lines")
def command(
    settings: Settings,
    /,
    texts: tuple[str, ...],
    pool: str | None,
    normalize: bool | None,
    prompt: str | None,
    batch: int | None,
    kind: str | None,
) -> None:
    """Turn each TEXT into one vector. From a pipe, each line is a text, an empty line too.

    Texts that mean alike have vectors that point alike: with several texts, their cosines are shown too. The default
    model is all-MiniLM-L6-v2, from the hub.
    """
    as_text = settings.json or settings.jsonl or kind == "json"
    if kind is None and not as_text and settings.to_file and str(settings.out).endswith(".npy"):
        kind = "npy"
    _check(settings, batch, kind)
    model_of_kind(settings, "a model that makes vectors", SENTENCES)
    found = texts_arguments(texts, missing='No text. Try: cutaway embed "a cat" "a kitten" "a stock market"')
    model = load_model(settings)
    check_able(settings, model, "embed")
    if model.sentence is None and pool is None and not as_text:
        settings.note(
            "note: this checkpoint does not say how it makes vectors: each is the mean of its tokens' (--pool)"
        )
    parts = []
    for start in range(0, len(found), batch or len(found)):
        some = found[start : start + (batch or len(found))]
        with reading(some, start):
            parts.append(model.embed(some, pool=pool, normalize=normalize, prompt=prompt))
    import torch

    vectors = torch.cat(parts)
    if kind == "npy":
        import numpy as np

        buffer = io.BytesIO()
        np.save(buffer, vectors.numpy())
        settings.emit_bytes(buffer.getvalue())
    elif as_text:
        rows = [{"text": text, "vector": vector} for text, vector in zip(found, vectors.tolist(), strict=True)]
        settings.emit_json(rows if settings.jsonl else {"model": settings.model, "vectors": rows})
    else:
        settings.emit("\n".join(_lines(found, vectors, settings.look)) + "\n")


def _check(settings: Settings, batch: int | None, kind: str | None) -> None:
    if batch is not None and batch < 1:
        raise click.BadParameter("at least one text must be read at once.", param_hint="--batch")
    if kind != "npy":
        return
    if settings.json or settings.jsonl:
        raise click.BadParameter("an array is not JSON: leave one out.", param_hint="--format")
    if not settings.to_file and sys.stdout.isatty():
        raise click.BadParameter(
            "an array is nothing to look at: add --out NAME.npy, or a pipe.", param_hint="--format"
        )


def _lines(texts: list[str], vectors: Tensor, look: Look) -> list[str]:
    """The first numbers of each vector, and how alike they are."""
    size = vectors.shape[-1]
    room = max(min(max(width(t) for t in texts), look.width // 3), _LABEL) if look.fits else sys.maxsize
    labels = [shown_text(text, look, room) for text in texts]
    rest = f"{size:,} numbers"
    taken = max(width(label.text) for label in labels) + 2 + len(rest) + 4
    shown = min(_SHOWN, max(1, (look.width - taken) // _NUMBER)) if look.fits else _SHOWN
    mark = "..." if look.plain else "…"
    rows = []
    for label, vector in zip(labels, vectors[:, :shown].tolist(), strict=True):
        numbers = "  ".join(f"{x:+.3f}" for x in vector)
        rows.append([label, Cell(f"{numbers}  {mark} {rest}" if size > shown else numbers, "dim")])
    lines = table(rows, "ll", look, gives=1)
    return [*lines, "", *_cosines(labels, vectors, look)] if 1 < len(texts) <= _MOST else lines


def _cosines(labels: list[Cell], vectors: Tensor, look: Look) -> list[str]:
    """Each text with each; where that is too wide, each with the one that is most like it."""
    unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    cosines = unit @ unit.t()
    count = len(labels)
    if count <= _TABLE and (not look.fits or _LABEL + 7 * count <= look.width):
        rows: list[list[str | Cell]] = [
            [Cell(f"{i}", "dim"), label, *(f"{x:.3f}" for x in row)]
            for i, (label, row) in enumerate(zip(labels, cosines.tolist(), strict=True), 1)
        ]
        head: list[str | Cell] = [Cell(""), Cell("cosines", "dim"), *(Cell(f"{i}", "dim") for i in range(1, count + 1))]
        return table([head, *rows], "rl" + "r" * count, look, gives=1)
    best, nearest = cosines.fill_diagonal_(-2).max(-1)
    near: list[list[str | Cell]] = [[Cell("cosines", "dim"), "", Cell("nearest", "dim")]]
    for label, cosine, other in zip(labels, best.tolist(), nearest.tolist(), strict=True):
        near.append([label, f"{cosine:.3f}", Cell(labels[other].text, "dim")])
    return table(near, "lrl", look, gives=2)
