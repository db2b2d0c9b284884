"""``cutaway next``: what a model expects next, and how surely."""

from __future__ import annotations

import re
from dataclasses import replace

import click

from cutaway.cli.common import Settings, as_input, load_model, text_argument
from cutaway.cli.distribution import Distribution, divergence, draw, predict
from cutaway.cli.kinds import check_able
from cutaway.cli.options import COUNT, Number, shared
from cutaway.cli.text import Look, counted, cut, visible, width

_GUTTER = 3
_SIDE_BY_SIDE = 72  # columns that two lists beside each other need
_ESCAPE = re.compile("\x1b\\[[0-9;]*m")


@click.command("next")
@click.argument("prompt", required=False)
@click.option("--top", type=COUNT, default=10, show_default=True, metavar="K", help="How many tokens to show.")
@click.option(
    "-t", "--temperature", type=Number(0), metavar="X", default=1.0, show_default=True, help="Divides the logits first."
)
@click.option("--compare", metavar="PROMPT2", help="A second prompt, to show beside the first.")
@click.option("--special", is_flag=True, help="Control tokens typed in a prompt count as such, not as text.")
@shared("model", "load", "lines")
def command(
    settings: Settings, /, prompt: str | None, top: int, temperature: float, compare: str | None, special: bool
) -> None:
    """Show the distribution of the token that follows PROMPT; of an encoder-decoder, of its answer's first token.

    A leading space shows as a dot, line ends and other invisible characters as signs. The bars are relative to the
    likeliest token; the last column is the logit.
    """
    if top < 1:
        raise click.BadParameter("at least one token must be shown.", param_hint="--top")
    text = text_argument(prompt, missing='No prompt. Try: cutaway next "The capital of France is"')
    model = load_model(settings)
    check_able(settings, model, "next")
    prompts = [text] if compare is None else [text, compare]
    found = []
    for one in prompts:
        with as_input():
            if special and model.tokenizer is not None and one:
                ids = model.tokenizer.encode(one, special=True)
            else:
                ids = model.encode_prompt(one)
        found.append(predict(model, one, ids, top, temperature))
    distributions = [distribution for distribution, _ in found]
    apart = divergence(found[0][1], found[1][1]) if compare is not None else None

    if settings.json or settings.jsonl:
        objects = [d.as_dict() for d in distributions]
        if settings.jsonl:
            settings.emit_json([{"prompt": o["prompt"], **c} for o in objects for c in o["candidates"]])
        else:
            value = {"model": settings.model, "temperature": temperature, **objects[0]}
            more = {"compare": objects[1], "jensen_shannon_bits": apart} if len(objects) > 1 else {}
            settings.emit_json(value | more)
        return
    look = settings.look
    lines = (
        _one(distributions[0], look, temperature) if apart is None else _two(distributions, look, temperature, apart)
    )
    settings.emit("\n".join(lines) + "\n")


def _one(distribution: Distribution, look: Look, temperature: float) -> list[str]:
    return [*_head(distribution, look, temperature), *draw(distribution, look)]


def _head(distribution: Distribution, look: Look, temperature: float) -> list[str]:
    """The end of the prompt, and the facts."""
    shown = cut(visible(distribution.prompt, look), look.width, look, left=True)
    facts = [counted(distribution.n_tokens, "token"), f"entropy {distribution.entropy:.2f} bits"]
    if distribution.answers:
        facts.append("the answer's first token")
    if temperature != 1:
        facts.append(f"temperature {temperature:g}")
    return [look.paint(shown, "bold"), look.paint(cut(f" {look.dot} ".join(facts), look.width, look), "dim"), ""]


def _two(distributions: list[Distribution], look: Look, temperature: float, apart: float) -> list[str]:
    """Both lists, beside each other where there is room."""
    a, b = ({c.id for c in d.best} for d in distributions)
    both = frozenset(a & b)
    count = max(len(a), len(b))
    mark = "*" if look.plain else "•"
    alike = f"{len(both)} of {count} in both lists ({mark}) {look.dot} Jensen-Shannon divergence {apart:.3f} bits"
    if look.width < _SIDE_BY_SIDE:
        lists = [[*_head(d, look, temperature), *draw(d, look, shared=both)] for d in distributions]
        return [*lists[0], "", *lists[1], "", look.paint(cut(alike, look.width, look), "dim")]
    half = replace(look, width=(look.width - _GUTTER) // 2)
    left, right = ([*_head(d, half, temperature), *draw(d, half, shared=both)] for d in distributions)
    height = max(len(left), len(right))
    left += [""] * (height - len(left))
    right += [""] * (height - len(right))
    gap = " " * _GUTTER
    lines = [x + " " * (half.width - width(_ESCAPE.sub("", x))) + gap + y for x, y in zip(left, right, strict=True)]
    return [line.rstrip() for line in lines] + ["", look.paint(alike, "dim")]
