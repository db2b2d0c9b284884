"""``cutaway lens``: what a model would say if it ended early, layer by layer."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings, as_input
from cutaway.cli.options import COUNT
from cutaway.cli.seeing import at_token, emit_result, last_of, looks, opened


@click.command("lens")
@click.option("--follow", metavar="WORD", help="A word whose rank and probability are told. [the one said in the end]")
@at_token
@click.option("--all", "every", is_flag=True, help="At every token of the prompt.")
@click.option("--at", multiple=True, metavar="NAME", help="Points or patterns, such as decoder.layers.*.attn.out.")
@click.option("--top", type=COUNT, default=5, show_default=True, metavar="K", help="How many tokens --json has.")
@click.option("--tuned", metavar="FILE", help="A tuned lens of this model, as TunedLens.save wrote it.")
@looks
def command(
    settings: Settings,
    /,
    prompt: str | None,
    follow: str | None,
    position: int | None,
    every: bool,
    at: tuple[str, ...],
    top: int,
    tuned: str | None,
    target: str | None,
) -> None:
    """Show what each layer of the model would say after PROMPT, had it ended there (the logit lens).

    The last norm and the head read the stream before its end: an approximation, worst in early layers.
    """
    if every and position is not None:
        raise click.UsageError("--all has every token.", click.get_current_context())
    model, text = opened(settings, prompt, "lens")
    with as_input():
        inside = model.inside
        lens = None if tuned is None else inside.load_lens(tuned)
        where = None if every else [last_of(model, text) if position is None else position]
        result = inside.lens(
            text, at or None, follow="final" if follow is None else follow, positions=where, k=top, target=target,
            tuned=lens, progress=not settings.quiet,
        )  # fmt: skip
    emit_result(settings, result, prompt=text)
