"""``cutaway run``: complete a text, as it comes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from cutaway.cli.common import Settings, as_input, load_model, text_argument, to_json
from cutaway.cli.options import COUNT, shared
from cutaway.cli.sampling import Clock, as_dict, choosing, given, note_end, note_idle, stats_line, stream, token_text
from cutaway.cli.text import safe, table, visible

if TYPE_CHECKING:
    from cutaway.generation.generate import Generation
    from cutaway.model import Model, Prompt


@click.command("run")
@click.argument("prompt", required=False)
@click.option("-n", "--max-tokens", type=COUNT, default=256, show_default=True, help="Most tokens to write.")
@choosing
@click.option("--logprobs", type=COUNT, metavar="K", help="Log-probabilities of the chosen and the K best tokens.")
@click.option("--echo", is_flag=True, help="Print the prompt first.")
@click.option("--stats", is_flag=True, help="Tokens a second, and the time to the first.")
@click.option("--special", is_flag=True, help="Control tokens typed in the prompt count as such, not as text.")
@shared("model", "load", "seed", "lines")
def command(
    settings: Settings, /, prompt: str | None, max_tokens: int, echo: bool, stats: bool, special: bool, **options: Any
) -> None:
    """Complete PROMPT, printing the text as it comes.

    Without PROMPT, or with -, the prompt is read from standard input; one line end at its end is left out. To talk
    with a model, use `cutaway chat`.
    """
    text = text_argument(prompt, missing="No prompt. Give one, pipe one in, or talk with `cutaway chat`.")
    clock = Clock()
    model = load_model(settings)
    clock.loaded_in = time.perf_counter() - clock.start
    ids = _ids(model, text, special)
    arguments = given({"max_tokens": max_tokens, "seed": settings.seed, **options}.items())
    note_idle(settings, model, arguments)

    streamed = not (settings.json or settings.to_file)
    pieces = [text] if echo else []
    show = _printer(settings) if streamed else pieces.append
    if streamed and echo and not settings.jsonl:
        show(text)
    try:
        result = stream(model, ids, arguments, clock, show)
    except KeyboardInterrupt:
        if streamed and sys.stdout.isatty():
            print()  # the shell's prompt belongs on a line of its own
        raise
    if settings.json or settings.jsonl:
        value = as_dict(model, result, arguments, clock, settings)
        if echo:
            value["text"] = text + value["text"]
        settings.emit(to_json(value, indent=2 if settings.json else None) + "\n")
    elif streamed:
        print(flush=True)
    else:
        settings.emit("".join(pieces) + "\n")
    _report(settings, model, result, clock, stats, max_tokens)


def _ids(model: Model, text: str, special: bool) -> Prompt:
    with as_input():
        if special and model.tokenizer is not None and text:
            return model.tokenizer.encode(text, special=True)
        return model.encode_prompt(text)


def _printer(settings: Settings) -> Any:
    """Prints a piece at once: as it is, defused on a terminal, or as a JSON object a line."""
    defuse = sys.stdout.isatty()

    def show(piece: str) -> None:
        line = to_json({"piece": piece}) + "\n" if settings.jsonl else safe(piece) if defuse else piece
        sys.stdout.write(line)
        sys.stdout.flush()

    return show


def _report(settings: Settings, model: Model, result: Generation, clock: Clock, stats: bool, max_tokens: int) -> None:
    """What belongs beside the text, on standard error."""
    note_end(settings, model, result, max_tokens)
    if stats:
        print(stats_line(clock.report(result), result), file=sys.stderr)
    if result.logprobs is None or settings.json or settings.jsonl:
        return
    look = settings.look
    rows = []
    for entry in result.logprobs:
        best = (f"{visible(token_text(model, token), look)} {value:.2f}" for token, value in entry.top)
        rows.append([visible(token_text(model, entry.token), look), f"{entry.logprob:.3f}", "  ".join(best)])
    print("\n".join(table(rows, "lrl", look, gives=2)), file=sys.stderr)
