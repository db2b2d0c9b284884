"""``cutaway trace``: run once and keep what was named, as a file; or print such a file."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import click

from cutaway.cli.common import Settings, as_input, load_model, text_argument
from cutaway.cli.options import COUNT, shared
from cutaway.cli.seeing import answer, emit_figure
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.inspection.trace import Trace
    from cutaway.spec import ModelSpec

USUAL = ("*.resid_in", "*.norm.out", "*.attn.weights")
ENDING = ".cut"


@click.command("trace")
@click.argument("prompt", required=False, metavar="PROMPT | FILE.cut")
@click.option("--keep", multiple=True, metavar="NAME", help="Names or patterns; `cutaway show --taps` lists them.")
@click.option("--layers", metavar="LIST", help="Only of these layers: 0,3-5.")
@click.option("-n", "--max-tokens", type=COUNT, default=0, metavar="N", help="Tokens to go on with; they are kept too.")
@answer
@shared("model", "load", "output")
def command(
    settings: Settings,
    /,
    prompt: str | None,
    keep: tuple[str, ...],
    layers: str | None,
    max_tokens: int,
    target: str | None,
) -> None:
    """Run PROMPT and keep quantities of the run, through every generated token; or show what FILE.cut has.

    With -o FILE.cut they are written (safetensors inside; `Trace.open` reads them without the model). By default the
    stream before each layer and at the end, and the attention weights.
    """
    text = text_argument(prompt, missing='No prompt. Try: cutaway trace "The Eiffel Tower is in" -o eiffel.cut')
    if text.endswith(ENDING):
        if keep or layers or max_tokens or settings.to_file:
            raise click.UsageError("A file is only shown.", click.get_current_context())
        show(settings, text)
        return
    if settings.to_file and not str(settings.out).endswith(ENDING):
        raise click.UsageError(f"-o takes a file that ends in {ENDING}.", click.get_current_context())
    wanted = keep or USUAL
    some = None if layers is None else _numbers(layers)
    model = load_model(settings)
    with as_input():
        names = _of_layers(model.spec, wanted, some, exact=bool(keep))
        found = model.inside.trace(text, *names, max_tokens=max_tokens, target=target)
    if settings.to_file:
        found.save(str(settings.out))
        settings.note(f"wrote {settings.out}; `cutaway trace {settings.out}` shows it")
        settings.out = None
    _emit(settings, found)


def show(settings: Settings, path: str) -> None:
    """What a file of a trace has in it."""
    from cutaway.inspection.trace import Trace

    with as_input():
        found = Trace.open(path)
    _emit(settings, found)


def _emit(settings: Settings, found: Trace) -> None:
    if settings.json or settings.jsonl:
        settings.emit_json(found.as_dict())
        return
    emit_figure(settings, found.figure())


def _numbers(text: str) -> set[int]:
    """``0,3-5`` → {0, 3, 4, 5}."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise click.BadParameter(f"{text!r} is no list of layers such as 0,3-5.", param_hint="--layers")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _of_layers(spec: ModelSpec, patterns: tuple[str, ...], layers: set[int] | None, *, exact: bool) -> list[str]:
    """The names that patterns match, in these layers; of the usual ones, those that there are.

    Raises:
        NameNotFound: a pattern matches nothing.
        RequestError: nothing of it is in these layers.
    """
    from cutaway.spec.names import match, tap_names

    known = tap_names(spec)
    found = match(patterns, known) if exact else [n for p in patterns for n in known if fnmatchcase(n, p)]
    if layers is None:
        return list(dict.fromkeys(found))
    kept = [n for n in found if (at := re.match(r"\w+\.layers\.([0-9]+)\.", n)) and int(at[1]) in layers]
    if not kept:
        raise RequestError("nothing of this is in these layers", field="--layers", got=sorted(layers))
    return list(dict.fromkeys(kept))
