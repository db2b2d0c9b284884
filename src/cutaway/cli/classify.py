"""``cutaway classify``: labels for texts, with their probabilities."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings, as_input, load_model
from cutaway.cli.options import COUNT, shared
from cutaway.cli.text import Cell, bar, table, visible
from cutaway.cli.texts import model_of_kind, texts_arguments

_BAR = 24


@click.command("classify")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--pair", metavar="TEXT2", help="A second text, read together with each TEXT.")
@click.option("--top", type=COUNT, metavar="K", help="How many labels to show. [all]")
@shared("model", "load", "lines")
def command(settings: Settings, /, texts: tuple[str, ...], pair: str | None, top: int | None) -> None:
    """Say what each TEXT is about, in the words of a classifier. From a pipe, each line is a text."""
    found = texts_arguments(texts, missing='No text. Try: cutaway classify -m FOLDER "I was charged twice"')
    model_of_kind(settings, "a checkpoint that labels texts")
    if top is not None and top < 1:
        raise click.BadParameter("at least one label must be shown.", param_hint="--top")
    model = load_model(settings)
    with as_input():
        answers = model.classify([text if pair is None else (text, pair) for text in found])
    answers = [labels[:top] for labels in answers]
    if settings.json or settings.jsonl:
        rows = [
            {"text": text, "labels": [{"label": label.label, "score": label.score} for label in labels]}
            for text, labels in zip(found, answers, strict=True)
        ]
        settings.emit_json(rows if settings.jsonl else {"model": settings.model, "texts": rows})
        return
    look = settings.look
    lines: list[str] = []
    for text, labels in zip(found, answers, strict=True):
        if len(found) > 1:
            lines += ([""] if lines else []) + [look.paint(visible(text, look), "bold")]
        shown = [
            [
                Cell(visible(label.label, look)),
                Cell(f"{label.score:.3f}"),
                Cell(bar(_share(label.score), _BAR, look), "cyan"),
            ]
            for label in labels
        ]
        lines += table(shown, "lrl", look, gives=0)
    settings.emit("\n".join(lines) + "\n")


def _share(score: float) -> float:
    """Of a regression, which may be any number, no more than a whole bar."""
    return min(max(score, 0.0), 1.0)
