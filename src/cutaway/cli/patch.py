"""``cutaway patch``: change something inside, and see what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cutaway.cli.common import Settings, as_input
from cutaway.cli.options import COUNT
from cutaway.cli.seeing import emit_result, looks, opened, place_of
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.inspection.change import Edit
    from cutaway.model import Model


@click.command("patch")
@click.option("--zero", multiple=True, metavar="PLACE", help="Nothing there: L3.H5, L7.mlp, or a whole name.")
@click.option("--scale", multiple=True, metavar="PLACE=X", help="So many times what is there: L7.mlp=0.5.")
@click.option("--from", "other", metavar="PROMPT2", help="What is there for this prompt, put into PROMPT's run.")
@click.option("--at", multiple=True, metavar="PLACE", help="Where --from takes hold. [everywhere, one after another]")
@click.option(
    "--over",
    type=click.Choice(["position", "head", "branch"]),
    help="Of --from without --at: layers by what. [position]",
)
@click.option("--align", type=click.Choice(["end"]), help="Of prompts of two lengths: places count from the end.")
@click.option("--stack", type=click.Choice(["encoder", "decoder"]), help="Whose layers. [those before the head]")
@click.option("--word", "words", multiple=True, metavar="WORD", help="Tell of it too; in a sweep, WORD less WORD2.")
@click.option("--token", "position", type=int, metavar="N", help="Only at this token of the prompt, from 0.")
@click.option("--top", type=COUNT, default=5, show_default=True, metavar="K", help="How many tokens of either answer.")
@looks
def command(
    settings: Settings,
    /,
    prompt: str | None,
    zero: tuple[str, ...],
    scale: tuple[str, ...],
    other: str | None,
    at: tuple[str, ...],
    over: Any,
    align: str | None,
    stack: str | None,
    words: tuple[str, ...],
    position: int | None,
    top: int,
    target: str | None,
) -> None:
    """Edit PROMPT's run and show its answer before and after; or sweep through all that another prompt could bring.

    PLACE is L3.H5 (a head of layer 3), L7.mlp or L7.attn (what a branch adds), L7 (both), decoder.layers.7.mlp.act.
    With --from alone, what each layer has for PROMPT2 at each token is put into PROMPT's run, one at a time: 1 where
    that makes PROMPT's answer PROMPT2's.
    """
    context = click.get_current_context()
    if not (zero or scale or other):
        raise click.UsageError(
            'Say what is changed: --zero L3.H5, --scale L7.mlp=0, or --from "another prompt".', context
        )
    if at and other is None:
        raise click.UsageError("--at says where --from takes hold.", context)
    sweeping = other is not None and not at
    if sweeping and (zero or scale):
        raise click.UsageError("--from without --at is a sweep, and edits nothing else.", context)
    if (over or stack or align) and not sweeping:
        raise click.UsageError("--over, --stack and --align are for --from without --at.", context)
    model, text = opened(settings, prompt, "patch --zero L3.H5")
    with as_input():
        if sweeping:
            assert other is not None
            more: dict[str, Any] = {} if position is None else {"positions": [position]}
            if len(words) > 2:
                raise RequestError(
                    "a sweep asks about one word, or one against another", field="--word", got=len(words)
                )
            more |= dict(zip(("answer", "against"), words, strict=False))
            more |= {
                "over": over or "position",
                "align": align,
                "stack": stack,
                "target": target,
            }
            more["progress"] = not settings.quiet
            result = model.inside.patch_sweep(other, text, **more)
            emit_result(settings, result, prompt=text, **{"from": other})
            return
        edits = _edits(model, text, zero, scale, other, at, position, target)
        result_of = model.inside.effect(text, edits, k=top, also=words, target=target)
    emit_result(settings, result_of, prompt=text, **{"from": other})


def _edits(
    model: Model,
    text: str,
    zero: tuple[str, ...],
    scale: tuple[str, ...],
    other: str | None,
    at: tuple[str, ...],
    position: int | None,
    target: str | None,
) -> dict[str, Edit]:
    """What is edited, by name."""
    from cutaway import edits as made

    found: dict[str, Any] = {}
    for place in zero:
        _add(found, model, place, made.zero, position)
    for one in scale:
        place, _, factor = one.partition("=")
        try:
            by = float(factor)
        except ValueError:
            raise RequestError(
                "not a place and a number", field="--scale", expected="such as L7.mlp=0", got=one
            ) from None
        _add(found, model, place, lambda by=by, **where: made.scale(by, **where), position)
    if other is not None:
        names = [place_of(model, place)[0] for place in at]
        there = model.inside.trace(other, *names, target=target)
        for place in at:
            _add(found, model, place, lambda **where: made.replace(there, **where), position)
    return found


def _add(found: dict[str, Any], model: Model, place: str, make: Any, position: int | None) -> None:
    name, head = place_of(model, place)
    where = ({} if head is None else {"heads": head}) | ({} if position is None else {"positions": position})
    edit = make(**where)
    before = found.get(name)
    found[name] = edit if before is None else _Both(before, edit)


class _Both:
    """One edit after another, of the same quantity."""

    def __init__(self, first: Any, then: Any) -> None:
        self._first, self._then = first, then

    def change(self, value: Any, place: Any) -> Any:
        """See ``inspection.change.Changed``."""
        return self._then.change(self._first.change(value, place), place)
