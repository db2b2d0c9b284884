"""``cutaway fill``: the likeliest words for a text's blanks."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings, as_input, load_model, text_argument
from cutaway.cli.options import COUNT, shared
from cutaway.cli.text import Cell, bar, table, visible
from cutaway.cli.texts import model_of_kind

_BAR = 24


@click.command("fill")
@click.argument("text", required=False)
@click.option("--top", type=COUNT, default=5, show_default=True, metavar="K", help="How many candidates to show.")
@shared("model", "load", "lines")
def command(settings: Settings, /, text: str | None, top: int) -> None:
    """Show the likeliest tokens for each blank of TEXT. A blank is [MASK], or the model's own string for it."""
    found = text_argument(text, missing='No text. Try: cutaway fill -m FOLDER "The [MASK] sat on the mat."')
    model_of_kind(settings, "a masked language model, such as google-bert/bert-base-uncased")
    if top < 1:
        raise click.BadParameter("at least one candidate must be shown.", param_hint="--top")
    model = load_model(settings)
    with as_input():
        blanks = model.fill(found, top=top)
    if settings.json or settings.jsonl:
        rows = [[{"id": c.token, "text": c.text, "score": c.score} for c in candidates] for candidates in blanks]
        settings.emit_json(rows if settings.jsonl else {"model": settings.model, "text": found, "blanks": rows})
        return
    look = settings.look
    lines: list[str] = []
    for number, candidates in enumerate(blanks, 1):
        if len(blanks) > 1:
            lines += ([""] if lines else []) + [look.paint(f"blank {number}", "bold")]
        most = candidates[0].score or 1.0
        shown = [
            [Cell(visible(c.text, look)), Cell(f"{c.score:.3f}"), Cell(bar(c.score / most, _BAR, look), "cyan")]
            for c in candidates
        ]
        lines += table(shown, "lrl", look, gives=0)
    settings.emit("\n".join(lines) + "\n")
