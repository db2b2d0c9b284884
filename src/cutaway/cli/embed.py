"""``cutaway embed``: texts as vectors."""

from __future__ import annotations

import io

import click

from cutaway.cli.common import Settings, as_input, load_model
from cutaway.cli.options import shared
from cutaway.cli.text import Cell, table
from cutaway.cli.texts import SENTENCES, model_of_kind, texts_arguments

_SHOWN = 6  # numbers of a vector that a terminal shows


@click.command("embed")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--pool", type=click.Choice(["mean", "cls", "last", "max"]), help="How. [the checkpoint's own, or mean]")
@click.option("--normalize/--no-normalize", default=None, help="Bring vectors to length one. [the checkpoint's own]")
@click.option("--prompt", metavar="NAME", help="A text of the checkpoint's to put before each.")
@click.option("--format", "kind", type=click.Choice(["json", "npy"]), help="npy: one array, for --out or a pipe.")
@shared("model", "load", "lines")
def command(
    settings: Settings,
    /,
    texts: tuple[str, ...],
    pool: str | None,
    normalize: bool | None,
    prompt: str | None,
    kind: str | None,
) -> None:
    """Turn each TEXT into one vector. From a pipe, each line is a text.

    Texts that mean alike have vectors that point alike: with several texts, their cosines are shown too. The default
    model is all-MiniLM-L6-v2, from the hub.
    """
    found = texts_arguments(texts, missing='No text. Try: cutaway embed "a cat" "a kitten" "a stock market"')
    model_of_kind(settings, "a model that makes vectors", SENTENCES)
    model = load_model(settings)
    with as_input():
        vectors = model.embed(found, pool=pool, normalize=normalize, prompt=prompt)
    if kind == "npy":
        import numpy as np

        buffer = io.BytesIO()
        np.save(buffer, vectors.numpy())
        settings.emit_bytes(buffer.getvalue())
        return
    if settings.json or settings.jsonl or kind == "json":
        rows = [{"text": text, "vector": vector} for text, vector in zip(found, vectors.tolist(), strict=True)]
        settings.emit_json(rows if settings.jsonl else {"model": settings.model, "vectors": rows})
        return
    look = settings.look
    shown = [
        [Cell(text), Cell("  ".join(f"{x:+.3f}" for x in vector[:_SHOWN]) + f"  … {len(vector)} numbers", "dim")]
        for text, vector in zip(found, vectors.tolist(), strict=True)
    ]
    lines = table(shown, "ll", look, gives=0)
    if len(found) > 1:
        unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        cosines = (unit @ unit.t()).tolist()
        lines += ["", look.paint("cosines", "dim")]
        numbers = [[f"{value:.3f}" for value in row] for row in cosines]
        lines += table(
            [[text, *row] for text, row in zip(found, numbers, strict=True)], "l" + "r" * len(found), look, gives=0
        )
    settings.emit("\n".join(lines) + "\n")
