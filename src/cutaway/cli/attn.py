"""``cutaway attn``: who reads whom."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings, as_input
from cutaway.cli.seeing import branch_of, emit_result, looks, opened


@click.command("attn")
@click.option("--layer", type=int, metavar="N", help="Which layer, from 0.")
@click.option("--branch", metavar="NAME", help="cross, or a whole name: encoder.layers.0.attn.  [attn]")
@click.option("--head", "heads", type=int, multiple=True, metavar="N", help="Which head; all, for the last token.")
@looks
def command(
    settings: Settings,
    /,
    prompt: str | None,
    layer: int | None,
    branch: str | None,
    heads: tuple[int, ...],
    target: str | None,
) -> None:
    """Show the attention weights of a layer for PROMPT: of one head every token's, else the last token's by head.

    The weights are the model's own. They say where a head reads, and are no explanation of what it does.
    """
    model, text = opened(settings, prompt, "attn --layer 3")
    with as_input():
        result = model.inside.attention(text, branch_of(model, layer, branch), heads or None, target=target)
    emit_result(settings, result, prompt=text)
