"""``cutaway attribute``: what a score is made of, or which tokens it hangs on."""

from __future__ import annotations

from typing import Any

import click

from cutaway.cli.common import Settings, as_input
from cutaway.cli.seeing import asked_of, asks, emit_result, opened

METHODS = ("parts", "ig", "grad", "occlusion")


@click.command("attribute")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="parts",
    show_default=True,
    help="parts: the exact sum of heads, networks and biases. ig, grad, occlusion: a number for each token.",
)
@click.option("--baseline", metavar="WORD", help="Of ig and occlusion: what tokens are compared with. [nothing]")
@click.option("--steps", type=click.IntRange(1, 10_000), help="Of ig: places on the way. [50]")
@asks
def command(
    settings: Settings,
    /,
    prompt: str | None,
    word: str | None,
    contrast: str | None,
    method: str,
    baseline: str | None,
    steps: int | None,
    position: int | None,
    target: str | None,
) -> None:
    """Explain the score of what comes after PROMPT.

    By default as a sum that is exact but for the scale of norms, which is held. --method gives every token of the
    prompt a number instead: slopes and what a text without the token gives, each with its own limits.
    """
    if (baseline is not None and method not in ("ig", "occlusion")) or (steps is not None and method != "ig"):
        raise click.UsageError(f"--method {method} has no such option.", click.get_current_context())
    model, text = opened(settings, prompt, "attribute")
    more: dict[str, Any] = {"position": position, "target": target}
    more |= {} if baseline is None else {"baseline": baseline}
    more |= {} if steps is None else {"steps": steps}
    more |= {"progress": not settings.quiet} if method in ("ig", "occlusion") else {}
    with as_input():
        inside = model.inside
        of = asked_of(word, contrast)
        run: dict[str, Any] = {
            "parts": inside.decompose,
            "ig": inside.integrated_gradients,
            "grad": inside.saliency,
            "occlusion": inside.occlusion,
        }
        result = run[method](text, of, **more)
    emit_result(settings, result, prompt=text)
