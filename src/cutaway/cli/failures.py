"""Every way to end badly, as an exit code and three lines: what, why, what to do."""

from __future__ import annotations

import errno
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

from cutaway.cli.guesses import nearest_options
from cutaway.errors import CutawayError

__all__ = ["INTERNAL", "INTERRUPTED", "PIPE_CLOSED", "TERMINATED", "Failure", "failure_of", "guarded", "say"]

USAGE, RESOURCES, INTERNAL, INTERRUPTED, PIPE_CLOSED, TERMINATED = 2, 4, 70, 130, 141, 143

# An error's code → why it is one, and what to do, where the error itself does not say.
_MEANINGS: dict[str, tuple[str, str]] = {
    "format": ("the file breaks the rules of its format", "fetch it again, or convert it anew"),
    "truncated": ("the file ends before what it announces", "fetch it again: it is not whole"),
    "limit": ("the file claims a size that no honest one has", "do not trust this file; fetch it from its source"),
    "shard": ("files that belong together do not fit together", "fetch all of them again"),
    "dtype": ("numbers are stored in a way that is unknown or not allowed here", "convert the model to a common type"),
    "unsafe_format": ("reading it could run code", "look for a safetensors or GGUF version"),
    "shape": ("the tensors are not those of the model", "check that config and weights belong together"),
    "config": ("a setting is missing, unknown or out of range", "compare the config with the model's source"),
    "unsupported": ("cutaway does not have this", "`cutaway models` lists models that work"),
    "tokenizer": ("the vocabulary is damaged, or cannot do this", "check the text, or the tokenizer's files"),
    "template": ("the chat template is broken, or refuses these messages", "use `cutaway run` with a plain prompt"),
    "dataset": ("the file of prompts is unusable", "mend that line, then give the same command"),
    "resume": ("what is there was made otherwise", "give what it was made with, or begin anew"),
    "download": ("the network gave something else than was asked for", "try again"),
    "offline": ("the network may not be used", "run once without --offline"),
    "storage": ("the system refused", "check that the path exists, its permissions, and the space on the disk"),
    "locked": ("somebody else is writing there", "wait for them, then try again"),
    "name": ("nothing here goes by it", "`cutaway show -v` and `cutaway show --taps` list what there is"),
    "context": ("the model has no more positions", "give a shorter text"),
    "resources": ("there is not enough memory", "try a smaller model, or --dtype bf16"),
}
_UNKNOWN = (
    "what was asked for cannot be done",
    "`cutaway --help` lists the verbs, and `--help` after one its arguments",
)


class Failure(NamedTuple):
    """An ending to report. ``what`` is one line; ``why`` and ``do`` may be empty."""

    exit_code: int
    code: str
    what: str
    why: str = ""
    do: str = ""
    message: str = ""  # for --json; ``what`` if empty
    path: str | None = None
    field: str | None = None


def failure_of(error: BaseException) -> Failure:
    """What to say about an error, whoever raised it."""
    if isinstance(error, CutawayError):
        return _ours(error)
    if isinstance(error, click.ClickException):
        return _usage(error)
    if _is_out_of_memory(error):
        why = _one_line(error) if str(error) else "the system gave none"
        return Failure(RESOURCES, "resources", "out of memory", why, _MEANINGS["resources"][1])
    if isinstance(error, OSError) and error.errno is not None:
        full = error.errno == errno.ENOSPC
        path = error.filename if isinstance(error.filename, str) else None
        do = "free some space" if full else _MEANINGS["storage"][1]
        what = f"{path}: {error.strerror}" if path else str(error.strerror)
        return Failure(RESOURCES, "storage", what, _MEANINGS["storage"][0], do, path=path)
    return Failure(
        INTERNAL,
        "internal",
        f"something broke inside cutaway: {type(error).__name__}: {_one_line(error)}",
        "this is a mistake of ours, not of yours",
        "please report it, with what the same command prints with --debug and what `cutaway doctor` says",
    )


def _ours(error: CutawayError) -> Failure:
    why, do = _MEANINGS.get(error.code, _UNKNOWN)
    # The line is one sentence, "place: what (facts)"; the facts are the why where there are any.
    facts = [
        f"{word} {value}" for word, value in (("expected", error.expected), ("got", error.got)) if value is not None
    ]
    what = error.line()
    if facts:
        why = ", ".join(facts)
        what = what.removesuffix(f" ({why})")
    return Failure(error.exit_code, error.code, what, why, error.hint or do, error.line(), error.path, error.field)


def _usage(error: click.ClickException) -> Failure:
    context = error.ctx if isinstance(error, click.UsageError) else None
    message, guess = error.format_message(), ""
    if isinstance(error, click.NoSuchOption) and context is not None:
        message = error.message  # without click's own guess
        if near := nearest_options(error.option_name, context.command):
            guess = f"did you mean {' or '.join(near)}?"
    elif " Did you mean " in message:
        message, guess = message.split(" Did you mean ", 1)
        guess = f"did you mean {guess.strip()}"
    path = "cutaway" if context is None else context.command_path
    what = message[:1].lower() + message[1:].rstrip(".")
    why = "" if context is None else " ".join(context.get_usage().split()).replace("Usage:", "usage:")
    param = getattr(error, "param", None)
    return Failure(
        USAGE, "usage", what, why, guess or f"see `{path} --help`", message, field=getattr(param, "name", None)
    )


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on a CPU


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def say(failure: Failure, *, as_json: bool = False) -> None:
    """Print a failure on standard error."""
    if as_json:
        facts = {
            "code": failure.code,
            "message": failure.message or failure.what,
            "path": failure.path,
            "field": failure.field,
            "hint": failure.do or None,
        }
        print(json.dumps({"error": facts}), file=sys.stderr)
        return
    print(f"error: {failure.what}", file=sys.stderr)
    for label, text in (("why", failure.why), ("do", failure.do)):
        if text:
            print(f"  {label + ':':<4} {text}", file=sys.stderr)


def guarded(action: Callable[[], object], arguments: Sequence[str]) -> int:
    """Do something; return the exit code, having said on standard error what went wrong.

    ``arguments`` are the command line, looked at for --json and --debug, since it may not have been parsed yet.
    """
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:  # a person's own -W wins
                warnings.simplefilter("default", UserWarning)
            warnings.showwarning = _show_warning
            result = action()
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return PIPE_CLOSED
    except Exception as error:
        if "--debug" in flags:
            import traceback

            traceback.print_exc()
        failure = failure_of(error)
        say(failure, as_json="--json" in flags or "--jsonl" in flags)
        return failure.exit_code


def _show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    """One line; nothing with --quiet."""
    context = click.get_current_context(silent=True)
    if not (context is not None and getattr(context.obj, "quiet", False)):
        print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
