"""The entry of the process, and the static table of verbs. Not even click is imported before signals are seen to."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO, cast

from cutaway.cli.interrupts import leave_at_once

# verb → what it does, under the heading it stands with. Its module is cutaway.cli.{verb}.
VERBS: dict[str, dict[str, str]] = {
    "Use a model": {
        "run": "Complete a text, as it comes.",
        "chat": "Talk with a model.",
        "score": "How likely a text is, token by token.",
        "embed": "Texts as vectors.",
        "classify": "Labels for texts.",
        "tag": "The labelled parts of texts.",
        "fill": "Words for a text's blanks.",
    },
    "Look inside": {
        "next": "The next token's distribution, as bars.",
        "show": "What a model is made of, or one of its tensors.",
        "tokenize": "Text as tokens: ids, pieces, places, bytes.",
        "lens": "What each layer would say, had the model ended there.",
        "attribute": "What a score is made of, or which tokens it hangs on.",
        "attn": "Who reads whom, in one layer or by one head.",
        "heads": "What every head looks at, as scores.",
        "neurons": "The neurons that add most to what comes next.",
        "neighbors": "Words beside a word in the embedding table; analogies.",
        "patch": "Change something inside, and see what comes of it.",
        "compare": "Two models or prompts: the first quantity that differs.",
        "trace": "Run once and keep what was named, as a file.",
    },
    "Set up": {
        "models": "The catalogue, and what of it is here.",
        "pull": "Fetch a model.",
        "bench": "How fast a model runs here.",
        "quantize": "Make a smaller file of a model, and say what it costs.",
        "doctor": "Versions, devices, folders, and a self-test.",
        "completion": "Shell completion for bash, zsh or fish.",
    },
}
TOUR = """\
cutaway run "Once upon a time"            complete a text (fetches a 94 MiB model once)
cutaway chat                              talk with it
cutaway next "The capital of France is"   see what it expects next, and how surely
cutaway show                              see what it is made of; --taps for every quantity inside
cutaway lens "The Eiffel Tower is in"     see what each layer would say
cutaway --help                            all verbs; cutaway VERB --help for one of them
"""


def main() -> int:
    """Run this process's command line; return its exit code."""
    leave_at_once()
    _fill_closed()
    from cutaway.cli.failures import PIPE_CLOSED
    from cutaway.cli.group import invoke

    for stream in (sys.stdout, sys.stderr):  # what an encoding cannot say is escaped rather than fatal
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = invoke(sys.argv[1:])
    if code == PIPE_CLOSED:
        # Python flushes once more on the way out; nobody listens there.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _fill_closed() -> None:
    """Give a process that began without standard streams (``<&- >&- 2>&-``) some.

    Nothing comes from standard input, standard output is a pipe that nobody reads, and standard error goes nowhere.
    Else they would be None, and the next files that are opened would take their numbers.
    """
    if sys.stdin is None:
        sys.stdin = _stream(os.open(os.devnull, os.O_RDONLY), 0, "r")
    if sys.stdout is None:
        reader, writer = os.pipe()
        os.close(reader)
        sys.stdout = _stream(writer, 1, "w")
    if sys.stderr is None:
        sys.stderr = _stream(os.open(os.devnull, os.O_WRONLY), 2, "w")


def _stream(file: int, number: int, mode: str) -> TextIO:
    if file != number:
        os.dup2(file, number)
        os.close(file)
    return cast(TextIO, open(number, mode, encoding="utf-8", closefd=False))
