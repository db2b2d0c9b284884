"""``cutaway run --prompts FILE``: a file of prompts in, a file of answers out."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, cast

import click

from cutaway.cli.common import Settings, as_input
from cutaway.cli.interrupts import interruptible
from cutaway.cli.options import F, Number, Text
from cutaway.cli.text import counted

if TYPE_CHECKING:
    from cutaway.model import Model

_MOST = 1024
_OPTIONS = (
    click.option(
        "--prompts",
        type=Text(),
        metavar="FILE",
        help="Answer each prompt of a file (JSON lines with prompt or messages, or a text a line; - is standard "
        "input) as a line of JSON. With -o the same command goes on where it was cut off.",
    ),
    click.option(
        "--batch", type=Number(1, _MOST, whole=True), metavar="N", help="Of --prompts: so many at a time. [8]"
    ),
    click.option("--restart", is_flag=True, help="Of --prompts: throw away what -o has, and begin anew."),
)


def many(function: F) -> F:
    """Adds the options of a file of prompts."""
    decorated: Any = function
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return cast(F, decorated)


def check_many(settings: Settings, prompts: str | None, batch: int | None, restart: bool, **others: object) -> None:
    """Refuse what does not go with a file of prompts, or only with one.

    Args:
        others: by their names, options and arguments that are about one prompt.

    Raises:
        click.UsageError: it was given.
    """
    context = click.get_current_context()
    if prompts is None:
        alone = "--batch" if batch is not None else "--restart" if restart else ""
        if alone:
            raise click.UsageError(f"{alone} goes with --prompts.", context)
        return
    for name, value in others.items():
        if value not in (None, False):
            raise click.UsageError(f"--prompts is about many prompts, and {name} about one.", context)
    if settings.out in (None, "-"):
        for name, given in (("--restart", restart), ("--json", settings.json)):
            if given:
                raise click.UsageError(f"{name} with --prompts needs -o FILE.", context)


def answer_file(
    settings: Settings,
    model: Model,
    prompts: str,
    batch: int | None,
    restart: bool,
    arguments: dict[str, Any],
    stats: bool,
    load_s: float,
) -> None:
    """Answer a file of prompts, and say what came of it."""
    out, start = settings.out or "-", time.perf_counter()
    with as_input(), interruptible():
        report = model.generate_file(
            prompts, out, batch=batch, restart=restart, progress=not settings.quiet, **arguments
        )
    seconds, tokens = time.perf_counter() - start, report.usage.completion_tokens
    if stats:
        rate = tokens / seconds if seconds > 0 else 0.0
        said = f"{counted(tokens, 'token')} in {seconds:.2f} s, {rate:,.1f} tokens/s; load {load_s:.2f} s"
        print(said, file=sys.stderr)
    if out == "-":
        return
    made = report.prompts - report.kept
    if settings.json:
        from cutaway.generation.report import usage_as_plain

        facts = {"out": out, "prompts": report.prompts, "kept": report.kept, "written": made}
        facts["usage"] = usage_as_plain(report.usage)
        settings.out = None  # which has the answers
        settings.emit_json(facts)
        return
    before = f"; {counted(report.kept, 'answer')} had been there" if report.kept else ""
    settings.note(f"wrote {counted(made, 'answer')} to {out}{before}")
