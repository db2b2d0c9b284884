"""``cutaway neighbors``: words beside a word in the embedding table, and analogies."""

from __future__ import annotations

from typing import Any

import click

from cutaway.cli.common import Settings, as_input, load_model
from cutaway.cli.options import COUNT, shared
from cutaway.cli.seeing import emit_result


@click.command("neighbors")
@click.argument("words", nargs=-1, metavar="WORD | A B C")
@click.option("--top", type=COUNT, default=10, show_default=True, metavar="K", help="How many words to show.")
@click.option("--by", type=click.Choice(["cosine", "dot", "euclid"]), default="cosine", show_default=True)
@click.option("--table", type=click.Choice(["input", "output", "source"]), default="input", show_default=True)
@shared("model", "load", "output")
def command(settings: Settings, /, words: tuple[str, ...], top: int, by: str, table: str) -> None:
    """Show the words nearest to WORD in the embedding table; of three words, what A - B + C is nearest to.

    Most tokens begin with a space: cutaway neighbors " Paris", cutaway neighbors " king" " man" " woman".
    """
    if len(words) not in (1, 3):
        what = 'One word, or three. Try: cutaway neighbors " king" " man" " woman"'
        raise click.UsageError(what, click.get_current_context())
    model = load_model(settings)
    with as_input():
        more: dict[str, Any] = {"k": top, "by": by, "table": table}
        inside = model.inside
        result = inside.neighbours(words[0], **more) if len(words) == 1 else inside.analogy(*words, **more)
    emit_result(settings, result)
