"""``cutaway chat``: talk with a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from cutaway.cli.choosing import choosing, given, note_idle
from cutaway.cli.common import Settings, load_model, read_stdin
from cutaway.cli.failures import failure_of, say
from cutaway.cli.guessing import check_draft, guessing, load_draft
from cutaway.cli.interrupts import interruptible
from cutaway.cli.kinds import check_able
from cutaway.cli.options import COUNT, kv_dtype, shared
from cutaway.cli.sampling import as_dict, note_end, stats_line, times
from cutaway.cli.text import Look, safe
from cutaway.errors import CutawayError, TemplateError

if TYPE_CHECKING:
    from cutaway.cli.conversation import Conversation
    from cutaway.model import Model

_FENCE = '"""'


@click.command("chat")
@click.argument("question", required=False)
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("-n", "--max-tokens", type=COUNT, default=1024, show_default=True, help="Most tokens of an answer.")
@choosing
@guessing
@kv_dtype
@click.option("--stats", is_flag=True, help="Tokens a second after each answer.")
@shared("model", "load", "seed", "output")
def command(
    settings: Settings,
    /,
    question: str | None,
    system: str | None,
    max_tokens: int,
    stats: bool,
    **options: Any,
) -> None:
    """Talk with a model. With QUESTION, answer it and leave.

    In a conversation /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves. Where standard input is not a
    terminal, each of its lines is a question; with - all of it is one.
    """
    single = question is not None
    if not single and (settings.json or settings.to_file):
        raise click.UsageError("--json and --out are for one QUESTION.", click.get_current_context())
    if question == "-":
        question = read_stdin()
    check_draft(options)
    from cutaway.cli.conversation import Conversation

    start = time.perf_counter()
    model = load_model(settings)
    check_able(settings, model, "chat")
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        does = "completes" if model.spec.source is None else "answers a"
        hint = f"it {does} text: `cutaway run`"
        raise TemplateError("this model has no chat template", path=settings.model, hint=hint)
    options = load_draft(settings, options, model)
    arguments = given({"max_tokens": max_tokens, "seed": settings.seed, **options}.items())
    note_idle(settings, model, arguments)
    streamed = not (settings.json or settings.to_file)
    talk = Conversation(model, system, arguments, _printer() if streamed else lambda piece: None, _say)
    talk.load_s = time.perf_counter() - start
    if question is not None:
        _once(settings, model, talk, question, arguments, stats)
    elif sys.stdin.isatty():
        with interruptible():
            _converse(settings, model, talk, stats)
    else:
        _answer_lines(settings, model, talk, stats)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _printer() -> Any:
    defuse = sys.stdout.isatty()

    def show(piece: str) -> None:
        sys.stdout.write(safe(piece) if defuse else piece)
        sys.stdout.flush()

    return show


def _once(
    settings: Settings, model: Model, talk: Conversation, question: str, arguments: dict[str, Any], stats: bool
) -> None:
    """One question, one answer."""
    result = talk.answer(question)
    if result is None:
        raise KeyboardInterrupt
    if settings.json:
        settings.emit_json(as_dict(model, [result], arguments, talk.load_s, settings) | {"messages": talk.messages})
    elif settings.to_file:
        settings.emit(result.text + "\n")
    else:
        print(flush=True)
    note_end(settings, model, result, arguments["max_tokens"])
    if stats:
        print(stats_line(times(talk.load_s, [result]), result), file=sys.stderr)


def _turn(settings: Settings, model: Model, talk: Conversation, line: str, stats: bool) -> None:
    """One line of a person's."""
    if line.startswith("/"):
        again = talk.command(line)
        if again is None:
            return
        line = again
    result = talk.answer(line)
    print(flush=True)
    if result is None:
        settings.note("(stopped)")
        return
    note_end(settings, model, result, talk.max_tokens, "/set max_tokens")
    if stats:
        print(stats_line(times(talk.load_s, [result]), result), file=sys.stderr)


def _converse(settings: Settings, model: Model, talk: Conversation, stats: bool) -> None:
    """On a terminal: errors are said and the talk goes on."""
    from cutaway.cli.conversation import Leave

    with suppress(ImportError):
        import readline  # noqa: F401  importing it gives input() line editing and history
    settings.note(f"{model.origin or settings.model}: /help for commands, Ctrl-D to leave")
    for line in _typed(settings):
        try:
            _turn(settings, model, talk, line, stats)
        except Leave:
            return
        except CutawayError as error:
            say(failure_of(error))


def _typed(settings: Settings) -> Iterator[str]:
    """What a person types, a text between two fences as one; until Ctrl-D."""
    prompt = Look.of(sys.stderr).paint(">>> ", "bold green")
    while True:
        try:
            # input() edits lines only where it prints the prompt itself, on standard output
            if sys.stdout.isatty():
                line = input(">>> ")
            else:
                print(prompt, end="", file=sys.stderr, flush=True)
                line = input()
            if line.strip().startswith(_FENCE):
                line = _fenced(line.strip().removeprefix(_FENCE))
        except (EOFError, OSError):  # Ctrl-D, or a terminal that is gone
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            settings.note("(Ctrl-D or /exit leaves)")
            continue
        if line.strip():
            yield line.strip()


def _fenced(first: str) -> str:
    lines = [first] if first else []
    while not (lines and lines[-1].rstrip().endswith(_FENCE)):
        lines.append(input("... "))
    return "\n".join(lines).rstrip().removesuffix(_FENCE)


def _answer_lines(settings: Settings, model: Model, talk: Conversation, stats: bool) -> None:
    """From a pipe or file: the first error ends it, as a script should be able to tell."""
    from cutaway.cli.conversation import Leave

    for line in read_stdin().splitlines():
        if not line.strip():
            continue
        try:
            _turn(settings, model, talk, line.strip(), stats)
        except Leave:
            return
