"""``cutaway tokenize``: text as tokens, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cutaway.cli.common import Settings, as_input, find, text_argument
from cutaway.cli.options import shared
from cutaway.cli.text import Cell, Look, counted, cut, table, visible
from cutaway.errors import RequestError

if TYPE_CHECKING:
    from cutaway.tokenizers.tokenizer import Piece, Tokenizer

_HUES = ("cyan", "yellow", "green", "magenta", "blue")


@click.command("tokenize")
@click.argument("text", required=False)
@click.option("--decode", metavar="IDS", help='Turn ids into text: --decode "1 2 3"; - reads them from standard input.')
@click.option("--chat", is_flag=True, help="As a user's message, through the model's chat template.")
@click.option("--special", is_flag=True, help="Control tokens typed in the text count as such, not as text.")
@click.option("--no-special", is_flag=True, help="The text alone, without the tokens the model puts around it.")
@shared("model", "find", "lines")
def command(
    settings: Settings, /, text: str | None, decode: str | None, chat: bool, special: bool, no_special: bool
) -> None:
    """Show how the model reads TEXT: each token's id, text, place and bytes.

    Without TEXT, or with -, it is read from standard input. No weights are loaded.
    """
    if decode is not None and (text is not None or chat):
        raise click.UsageError("--decode takes ids, and no TEXT or --chat.", click.get_current_context())
    if chat and (special or no_special):
        raise click.UsageError("--chat leaves the control tokens to the template.", click.get_current_context())
    if decode is not None:
        given = text_argument(decode, missing="")
        ids = _ids(given)
    else:
        text = text_argument(text, missing='No text. Try: cutaway tokenize "Hello, world"')
    tokenizer = _tokenizer(settings)
    with as_input():
        if decode is not None:
            pieces, text = tokenizer.pieces(ids), tokenizer.decode(ids, skip_special=False)
            if not (settings.json or settings.jsonl):
                settings.emit(text + "\n")
                return
        elif chat:
            pieces = tokenizer.pieces(tokenizer.chat([{"role": "user", "content": text}]))
        else:
            assert text is not None
            pieces = tokenizer.tokenize(text, bos=False if no_special else None, special=special)
    if settings.json or settings.jsonl:
        rows = [_as_dict(piece) for piece in pieces]
        settings.emit_json(rows if settings.jsonl else {"model": settings.model, "text": text, "tokens": rows})
        return
    settings.emit("\n".join(_lines(pieces, str(text), settings.look)) + "\n")


def _ids(words: str) -> list[int]:
    ids = []
    for word in words.replace(",", " ").replace("[", " ").replace("]", " ").split():
        if not word.isascii() or not word.isdigit():
            raise click.BadParameter(f"{word!r} is not a token id.", param_hint="--decode")
        ids.append(int(word))
    return ids


def _tokenizer(settings: Settings) -> Tokenizer:
    from cutaway.cli.anatomy import open_source

    with open_source(find(settings)) as source:
        tokenizer = source.tokenizer()
    if tokenizer is None:
        with as_input():
            raise RequestError("this model came without a tokenizer", path=settings.model, field="tokenizer")
    return tokenizer


def _as_dict(piece: Piece) -> dict[str, Any]:
    return {
        "id": piece.id,
        "text": piece.text,
        "bytes": list(piece.bytes),
        "special": piece.special,
        "start": piece.start,
        "end": piece.end,
    }


def _label(piece: Piece, look: Look) -> str:
    try:
        piece.bytes.decode("utf-8")
    except UnicodeDecodeError:
        return f"<{piece.bytes.hex(' ').upper()}>"
    return visible(piece.text, look)


def _lines(pieces: list[Piece], text: str, look: Look) -> list[str]:
    """The tokens in a row, the counts, and a table."""
    styles = [f"bold {_HUES[i % len(_HUES)]}" if p.special else _HUES[i % len(_HUES)] for i, p in enumerate(pieces)]
    labels = [_label(piece, look) for piece in pieces]
    wall = "|" if look.plain else "│"
    row = wall.join(labels)
    if len(row) <= 4 * look.width and look.colour:
        row = look.paint(wall, "dim").join(look.paint(x, s) for x, s in zip(labels, styles, strict=True))
    else:
        row = cut(row, look.width, look)
    size = len(text.encode("utf-8", "replace"))
    counts = ((len(pieces), "token"), (len(text), "character"), (size, "byte"))
    facts = f" {look.dot} ".join([counted(n, thing) for n, thing in counts])
    rows: list[list[str | Cell]] = []
    placed = any(piece.start is not None for piece in pieces)
    if pieces:
        rows.append([Cell(word, "dim") for word in ("id", "token", *(["place"] if placed else []), "bytes")])
    for piece, label, style in zip(pieces, labels, styles, strict=True):
        place = [] if not placed else [Cell("" if piece.start is None else f"{piece.start}:{piece.end}", "dim")]
        rows.append([str(piece.id), Cell(label, style), *place, Cell(piece.bytes.hex(" "), "dim")])
    body = table(rows, "rl" + ("r" if placed else "") + "l", look, gives=3 if placed else 2)
    return [row, look.paint(facts, "dim"), "", *body] if pieces else [look.paint(facts, "dim")]
