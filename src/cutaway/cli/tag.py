"""``cutaway tag``: the labelled parts of texts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cutaway.cli.common import Settings, load_model
from cutaway.cli.kinds import check_able
from cutaway.cli.options import shared
from cutaway.cli.text import Cell, Look, safe, table, visible
from cutaway.cli.texts import model_of_kind, reading, texts_arguments

if TYPE_CHECKING:
    from cutaway.tasks.labels import Span

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


@click.command("tag")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@shared("needed", "load", "lines")
def command(settings: Settings, /, texts: tuple[str, ...]) -> None:
    """Find the parts of each TEXT that a token classifier has labels for.

    They are coloured, or in brackets where there is no colour, and listed below the text with their places in
    characters. From a pipe, each line is a text, an empty line too.
    """
    model_of_kind(settings, "a checkpoint that labels tokens")
    found = texts_arguments(texts, missing='No text. Try: cutaway tag -m FOLDER "where is my order 4711?"')
    model = load_model(settings)
    check_able(settings, model, "tag")
    with reading(found):
        answers = model.tag(found)
    if settings.json or settings.jsonl:
        objects = [
            {"text": text, "spans": [asdict(span) for span in spans]}
            for text, spans in zip(found, answers, strict=True)
        ]
        settings.emit_json(objects if settings.jsonl else {"model": settings.model, "texts": objects})
        return
    look = settings.look
    kinds = sorted({span.label for spans in answers for span in spans})
    colours = {kind: _COLOURS[i % len(_COLOURS)] for i, kind in enumerate(kinds)}
    lines: list[str] = []
    for text, spans in zip(found, answers, strict=True):
        lines += ([""] if lines else []) + [painted(text, spans, colours, look) or look.paint("(empty)", "dim")]
        to = "-" if look.plain else "–"
        rows = [
            [
                Cell(f"{span.start}{to}{span.end}", "dim"),
                Cell(visible(span.label, look), colours[span.label]),
                Cell(f"{span.score:.3f}"),
                Cell(visible(span.text, look)),
            ]
            for span in spans
        ]
        lines += table(rows, "rlrl", look, gives=3) if rows else [look.paint("nothing is labelled", "dim")]
    settings.emit("\n".join(lines) + "\n")


def painted(text: str, spans: list[Span], colours: dict[str, str], look: Look) -> str:
    """The text, its labelled parts in colour; in brackets where there is none."""
    out, place = [], 0
    for span in spans:
        inside = safe(text[span.start : span.end])
        out += [
            safe(text[place : span.start]),
            look.paint(inside, colours[span.label]) if look.colour else f"[{inside}]",
        ]
        place = span.end
    return "".join([*out, safe(text[place:])])
