"""``cutaway score``: how likely a text is, token by token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from cutaway.cli.common import Settings, as_input, load_model, text_argument
from cutaway.cli.kinds import check_able
from cutaway.cli.options import COUNT, kv_dtype, shared
from cutaway.cli.sampling import logprob_lines
from cutaway.cli.text import counted, cut
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.generation.score import Score
    from cutaway.model import Model


@click.command("score")
@click.argument("text", required=False)
@click.option("--target", metavar="TEXT2", help="Of an encoder-decoder: score this answer to TEXT.")
@click.option("--top", type=COUNT, default=0, metavar="K", help="The K likeliest tokens at each place too.")
@kv_dtype
@shared("model", "load", "lines")
def command(settings: Settings, /, text: str | None, target: str | None, top: int, **options: Any) -> None:
    """Tell the log-probability of each token of TEXT given those before it, and what they come to.

    Perplexity is e to the mean loss of a token; bits per byte do not depend on how a text is cut into tokens. Without
    TEXT, or with -, it is read from standard input. A first token has nothing before it and does not count.
    """
    found = text_argument(text, missing='No text. Try: cutaway score "The cow says moo"')
    model = load_model(settings)
    check_able(settings, model, "score")
    if model.spec.source is not None and target is None:
        with as_input():
            what = "an encoder-decoder scores an answer to a text"
            raise RequestError(what, field="--target", hint="add --target TEXT2")
    with as_input():
        result = model.score(found, target=target, top=top, **options)
    sums = _sums(model, result)
    if settings.json or settings.jsonl:
        tokens = _plain(model, result)
        settings.emit_json(tokens if settings.jsonl else {"model": settings.model, **sums, "tokens": tokens})
        return
    look = settings.look
    lines = logprob_lines(model, zip(result.tokens, result.entries(), strict=True), look)
    facts = [
        counted(len(result.tokens), "token"),
        f"log-probability {result.total:.3f}",
        *(f"{name} {sums[key]:,.{places}f}" for key, name, places in _FACTS if sums[key] is not None),
    ]
    settings.emit("\n".join([*lines, "", look.paint(cut(f" {look.dot} ".join(facts), look.width, look), "dim")]) + "\n")


_FACTS = (("perplexity", "perplexity", 2), ("bits_per_byte", "bits per byte", 3))


def _sums(model: Model, result: Score) -> dict[str, Any]:
    """What the tokens that have a log-probability come to; None where there is no such token."""
    assert model.tokenizer is not None
    counted = [token for token, value in zip(result.tokens, result.logprobs, strict=True) if value is not None]
    size = sum(len(model.tokenizer.target.token_bytes(token)) for token in counted)
    mean = result.total / len(counted) if counted else None
    return {
        "logprob": result.total,
        "perplexity": None if mean is None or mean < -700 else math.exp(-mean),
        "bits_per_byte": -result.total / math.log(2) / size if size else None,
    }


def _plain(model: Model, result: Score) -> list[dict[str, Any]]:
    from cutaway.generation.report import entry_as_plain, token_as_plain

    words = None if model.tokenizer is None else model.tokenizer.target
    found = []
    for token, entry in zip(result.tokens, result.entries(), strict=True):
        found.append(entry_as_plain(entry, words) or {**token_as_plain(token, words), "logprob": None, "top": []})
    return found
