"""``cutaway fill``: the likeliest words for a text's blanks."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings, load_model, text_argument
from cutaway.cli.kinds import check_able
from cutaway.cli.options import COUNT, shared
from cutaway.cli.text import Cell, Look, bar, table, visible, width
from cutaway.cli.texts import model_of_kind, reading
from cutaway.errors import ContextExceeded, RequestError

_BAR = 24


@click.command("fill")
@click.argument("text", required=False)
@click.option("--top", type=COUNT, default=5, show_default=True, metavar="K", help="How many candidates to show.")
@shared("needed", "load", "lines")
def command(settings: Settings, /, text: str | None, top: int) -> None:
    """Show the likeliest tokens for each blank of TEXT. A blank is [MASK], or the model's own string for it.

    Several blanks are filled each for itself, the others staying blank.
    """
    if top < 1:
        raise click.BadParameter("at least one candidate must be shown.", param_hint="--top")
    model_of_kind(settings, "a masked language model, such as google-bert/bert-base-uncased")
    found = text_argument(text, missing='No text. Try: cutaway fill -m FOLDER "The [MASK] sat on the mat."')
    model = load_model(settings)
    check_able(settings, model, "fill")
    with reading([found]):
        try:
            blanks = model.fill(found, top=top)
        except ContextExceeded:
            raise
        except RequestError as error:
            error.hint = error.hint or "put [MASK] where a word is missing"
            raise
    if settings.json or settings.jsonl:
        rows = [[{"id": c.token, "text": c.text, "score": c.score} for c in candidates] for candidates in blanks]
        settings.emit_json(rows if settings.jsonl else {"model": settings.model, "text": found, "blanks": rows})
        return
    look = settings.look
    lines: list[str] = []
    for number, candidates in enumerate(blanks, 1):
        if len(blanks) > 1:
            lines += ([""] if lines else []) + [look.paint(f"blank {number}", "bold")]
        words = [(visible(c.text, look) or f"<{c.token}>", c.score) for c in candidates]
        lines += _bars(words, look)
    settings.emit("\n".join(lines) + "\n")


def _bars(words: list[tuple[str, float]], look: Look) -> list[str]:
    """Words with their probabilities, and bars relative to the likeliest's."""
    most = words[0][1] or 1.0
    room = min(_BAR, look.width - max(width(word) for word, _ in words) - 9) if look.fits else _BAR
    rows = [
        [Cell(word), Cell(f"{score:.3f}"), Cell(bar(score / most, max(room, 4), look), "cyan")] for word, score in words
    ]
    return table(rows, "lrl", look, gives=0)
