"""``cutaway compare``: two models, or two prompts, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from cutaway.cli.common import Settings, as_input, load_model
from cutaway.cli.options import Number, complete_model, shared
from cutaway.cli.seeing import answer, emit_result


@click.command("compare")
@click.argument("models", nargs=-1, metavar="MODEL [MODEL2]", shell_complete=complete_model)
@click.option("--prompt", metavar="TEXT", default="The Eiffel Tower is in", show_default=True, help="What both read.")
@click.option("--prompt2", metavar="TEXT", help="What the second reads instead.")
@click.option("--names", multiple=True, metavar="NAME", help="Only quantities of these names or patterns.")
@click.option("--tolerance", type=Number(0), default=1e-3, show_default=True, help="A relative difference that counts.")
@click.option("--dtype2", type=click.Choice(["fp32", "bf16", "fp16"]), help="Numbers of the second.")
@click.option("--quantize2", metavar="TYPE", help="Matrices of the second as q8_0 … q4_k.")
@answer
@shared("load", "output")
def command(
    settings: Settings,
    /,
    models: tuple[str, ...],
    prompt: str,
    prompt2: str | None,
    names: tuple[str, ...],
    tolerance: float,
    dtype2: str | None,
    quantize2: str | None,
    target: str | None,
) -> None:
    """Run MODEL and MODEL2 (or MODEL twice: with another prompt, dtype or quantization) and find where they part.

    The first quantity that differs, in the order of the computation, is where a port went wrong.
    """
    if not 1 <= len(models) <= 2:
        raise click.UsageError("One model, or two.", click.get_current_context())
    other = models[-1] != models[0] or dtype2 is not None or quantize2 is not None
    if not other and len(models) == 1 and prompt2 is None:
        what = "One model: say what is different, with --prompt2, --dtype2 or --quantize2."
        raise click.UsageError(what, click.get_current_context())
    if other and prompt2 is not None:
        raise click.UsageError("One difference at a time: another model, or --prompt2.", click.get_current_context())
    settings.model = models[0]
    left = load_model(settings)
    right = left
    if other:
        changed: dict[str, Any] = {"dtype": dtype2 or settings.dtype, "quantize": quantize2 or settings.quantize}
        right = load_model(replace(settings, model=models[-1], **changed))
    with as_input():
        more: dict[str, Any] = {"names": list(names) or None, "tolerance": tolerance, "target": target}
        more["progress"] = not settings.quiet
        result = left.inside.compare(prompt, right if prompt2 is None else prompt2, **more)
    emit_result(settings, result, models=[models[0], models[-1]], prompt=prompt, prompt2=prompt2)
