"""``cutaway heads``: what every head looks at, as scores."""

from __future__ import annotations

import click

from cutaway.cli.common import Settings, as_input, load_model
from cutaway.cli.seeing import emit_result, looks

KINDS = ("previous", "duplicate", "induction", "sink", "entropy", "distance")


@click.command("heads")
@click.option("--kind", type=click.Choice(KINDS), multiple=True, help="Only these scores.")
@click.option("--copying", is_flag=True, help="How far each head writes what it reads, from its weights alone.")
@click.option("--ablate", is_flag=True, help="The loss of the next token without each head, one at a time.")
@looks
def command(
    settings: Settings,
    /,
    prompt: str | None,
    kind: tuple[str, ...],
    copying: bool,
    ablate: bool,
    target: str | None,
) -> None:
    """Score every head: how far it reads the token before, the same token, what followed it, the first token.

    Without PROMPT on random tokens that come twice, where heads that copy what came before (induction heads) show.
    """
    if (copying and (prompt or kind or ablate)) or (ablate and kind):
        raise click.UsageError("--copying and --ablate each stand alone.", click.get_current_context())
    model = load_model(settings)
    with as_input():
        inside = model.inside
        if copying:
            emit_result(settings, inside.copying_scores(progress=not settings.quiet))
            return
        if ablate:
            emit_result(settings, inside.ablation_sweep(prompt, target=target, progress=not settings.quiet))
            return
        result = inside.head_scores(prompt, target=target)
    if kind:
        from dataclasses import replace

        result = replace(result, scores={name: result.scores[name] for name in kind})
    emit_result(settings, result, prompt=prompt)
