"""``cutaway classify``: labels for texts, with their probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cutaway.cli.common import Settings, load_model
from cutaway.cli.kinds import check_able
from cutaway.cli.options import COUNT, shared
from cutaway.cli.text import Cell, Look, bar, cut, table, visible, width
from cutaway.cli.texts import model_of_kind, reading, shown_text, texts_arguments

if TYPE_CHECKING:
    from cutaway.tasks.labels import Label

_BAR = 24


@click.command("classify")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--pair", metavar="TEXT2", help="A second text, read together with each TEXT.")
@click.option("--top", type=COUNT, metavar="K", help="How many labels to show. [all]")
@shared("needed", "load", "lines")
def command(settings: Settings, /, texts: tuple[str, ...], pair: str | None, top: int | None) -> None:
    """Say what each TEXT is about, in the words of a classifier.

    Labels have probabilities: together 1 where one is to be chosen, each its own where several may hold. A regression
    gives numbers. From a pipe, each line is a text, an empty line too.
    """
    if top is not None and top < 1:
        raise click.BadParameter("at least one label must be shown.", param_hint="--top")
    model_of_kind(settings, "a checkpoint that labels texts")
    found = texts_arguments(texts, missing='No text. Try: cutaway classify -m FOLDER "I was charged twice"')
    model = load_model(settings)
    check_able(settings, model, "classify")
    from cutaway.spec import ClassifierSpec

    assert isinstance(model.spec.head, ClassifierSpec)
    kind = model.spec.head.kind
    with reading(found):
        answers = model.classify([text if pair is None else (text, pair) for text in found])
    answers = [labels[:top] for labels in answers]
    if settings.json or settings.jsonl:
        second = {} if pair is None else {"pair": pair}
        rows = [
            {"text": text, **second, "labels": [{"label": label.label, "score": label.score} for label in labels]}
            for text, labels in zip(found, answers, strict=True)
        ]
        settings.emit_json(rows if settings.jsonl else {"model": settings.model, "kind": kind, "texts": rows})
        return
    look = settings.look
    room = look.width if look.fits else 10**9
    lines: list[str] = []
    for text, labels in zip(found, answers, strict=True):
        if len(found) > 1:
            label = shown_text(text, look, room)
            lines += ([""] if lines else []) + [look.paint(label.text, label.style)]
        lines += _scores(labels, look, bars=kind != "regression")
    settings.emit("\n".join(lines) + "\n")


def _scores(labels: list[Label], look: Look, *, bars: bool) -> list[str]:
    """Labels with their scores. A regression's, which may be any number, have no bars."""
    names = [visible(label.label, look) for label in labels]
    numbers = [f"{label.score:.3f}" for label in labels]
    longest = max(map(len, numbers))
    if look.fits:
        names = [cut(name, max(look.width - longest - 2, 4), look) for name in names]
    room = min(_BAR, look.width - max(map(width, names)) - longest - 4) if look.fits else _BAR
    if not bars or room < 4:
        return table(list(zip(names, numbers, strict=True)), "lr", look)
    strips = [Cell(bar(label.score, room, look), "cyan") for label in labels]
    return table(list(zip(names, numbers, strips, strict=True)), "lrl", look)
