"""``cutaway neurons``: the neurons that add most to what comes next, and what each writes."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings, as_input
from cutaway.cli.options import COUNT
from cutaway.cli.seeing import asked_of, asks, emit_result, opened


@click.command("neurons")
@click.option("--by-size", is_flag=True, help="By how much each writes to the stream, whatever comes of it.")
@click.option("--layer", "layers", type=int, multiple=True, metavar="N", help="Only of this layer; may be repeated.")
@click.option("--top", type=COUNT, default=10, show_default=True, metavar="K", help="How many neurons to show.")
@asks
def command(
    settings: Settings,
    /,
    prompt: str | None,
    word: str | None,
    contrast: str | None,
    by_size: bool,
    layers: tuple[int, ...],
    position: int | None,
    top: int,
    target: str | None,
) -> None:
    """Show the neurons of the feed-forward networks that add most to the score of what comes after PROMPT."""
    if by_size and (word or contrast):
        raise click.UsageError("--by-size asks about no word.", click.get_current_context())
    model, text = opened(settings, prompt, "neurons")
    with as_input():
        of = asked_of(word, contrast)
        result = model.inside.neurons(
            text, of, k=top, position=position, layers=layers or None, target=target, by_size=by_size
        )
    emit_result(settings, result, prompt=text)
