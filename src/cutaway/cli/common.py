"""What verbs share: settings, output, and getting hold of a model. Imports nothing heavy before it is used."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cutaway.cli.interrupts import interruptible
from cutaway.cli.text import Look, cut, look_at_stdout
from cutaway.errors import RequestError, TokenizerError
from cutaway.formats.strict_json import to_json

if TYPE_CHECKING:
    from cutaway.checkpoints.progress import Progress
    from cutaway.checkpoints.resolve import Resolved
    from cutaway.model import Model

_PATIENCE = 5.0  # seconds of loading that need no word where there is no terminal


@dataclass(slots=True)
class Settings:
    """The shared options of one command line. A verb that does not have an option leaves it as it is here."""

    quiet: bool = False
    verbose: int = 0
    json: bool = False
    jsonl: bool = False
    out: str | None = None
    debug: bool = False
    model: str = "smollm2"
    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    threads: int | None = None
    offline: bool = False
    revision: str | None = None
    seed: int | None = None

    @property
    def to_file(self) -> bool:
        """Whether data goes to --out."""
        return self.out not in (None, "-")

    @property
    def look(self) -> Look:
        """What the place of output can show."""
        return look_at_stdout(to_file=self.to_file)

    def note(self, text: str) -> None:
        """Say something beside the data, unless --quiet."""
        if not self.quiet:
            print(text, file=sys.stderr)

    def detail(self, text: str) -> None:
        """Say something that only --verbose wants."""
        if self.verbose:
            print(text, file=sys.stderr)

    def emit(self, text: str) -> None:
        """The data: to standard output, or to --out, whole or not at all."""
        if self.out is None or self.out == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        from cutaway.formats.files import atomic_write

        with interruptible(), atomic_write(self.out) as file:
            file.write(text.encode("utf-8", "backslashreplace"))

    def emit_bytes(self, data: bytes) -> None:
        """The data, where it is no text."""
        if not self.to_file:
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            return
        from cutaway.formats.files import atomic_write

        with interruptible(), atomic_write(str(self.out)) as file:
            file.write(data)

    def emit_json(self, value: Any) -> None:
        """One JSON object; with --jsonl and a list, one a line."""
        if self.jsonl and isinstance(value, list):
            self.emit("".join(to_json(item) + "\n" for item in value))
        else:
            self.emit(to_json(value, indent=None if self.jsonl else 2) + "\n")


# ── input ────────────────────────────────────────────────────────────────────────────────────────────────────


def read_stdin() -> str:
    """All of standard input as text, without the line end that ``echo`` puts last.

    Raises:
        TokenizerError: it is not UTF-8.
        RequestError: nothing came.
    """
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = "standard input is not UTF-8"
        raise TokenizerError(what, offset=error.start, hint="convert it first, as with iconv -t utf-8") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        with as_input():
            raise RequestError("nothing came on standard input", expected="a text", hint="give a text, or pipe one in")
    return text


def text_argument(text: str | None, *, missing: str) -> str:
    """The text a verb works on: its argument, or standard input for ``-`` or where that is not a terminal.

    Raises:
        click.UsageError: neither is there; ``missing`` says what to do.
    """
    if text is not None and text != "-":
        return text
    if text is None and sys.stdin.isatty():
        raise click.UsageError(missing, click.get_current_context())
    return read_stdin()


@contextmanager
def as_input() -> Iterator[None]:
    """What a person named (a file, a model, a prompt) is bad input when it is wrong, not bad usage."""
    try:
        yield
    except RequestError as error:
        error.exit_code = 3
        raise


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────


def find(settings: Settings, name: str | None = None) -> Resolved:
    """Where a model is, fetched if need be, with a word about it on standard error."""
    from cutaway.checkpoints.resolve import resolve

    name = settings.model if name is None else name
    with as_input(), progress(settings, _label(name)) as report:
        return resolve(name, revision=settings.revision, offline=settings.offline, progress=report)


def load_model(settings: Settings) -> Model:
    """The model of --model, as the other options want it."""
    import torch

    from cutaway.store import load

    if settings.threads:
        torch.set_num_threads(settings.threads)
    _check_device(settings.device)
    if settings.quantize == "int8":
        settings.note(
            "note: int8 rounds what matrices multiply too; `cutaway bench --quantize int8` says what it costs."
        )
    label = f"loading {_label(settings.model)}"
    with as_input(), progress(settings, label) as report:
        return load(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            quantize=settings.quantize,
            revision=settings.revision,
            offline=settings.offline,
            # a file in a cache may be called after its commit: people know a model by the name they gave
            progress=lambda done, total, says: report(done, total, label if says.startswith("loading") else says),
        )


def _label(name: str) -> str:
    """A model's name as one says it: without the folders before it."""
    return Path(name).name or name


def _check_device(device: str | None) -> None:
    import torch

    if device is None or device == "cpu":
        return
    kind, _, index = device.partition(":")
    there = torch.cuda.device_count() if kind == "cuda" else int(torch.backends.mps.is_available())
    if int(index or 0) >= there:
        raise RequestError(
            "this device is not here", field="--device", got=device, hint="leave --device out, or see `cutaway doctor`"
        )


@contextmanager
def progress(settings: Settings, label: str = "") -> Iterator[Progress]:
    """Transfers and loads, told on standard error; a quick load into a pipe or log is not worth a line.

    A bar is called ``label`` until something is reported.
    """
    from cutaway.checkpoints.progress import show_progress

    silent = settings.quiet or not sys.stderr
    with interruptible(), show_progress(silent, label=label) as report:
        if silent:
            yield report
            return
        if sys.stderr.isatty():
            look = Look.of(sys.stderr)
            # the bar's own columns take some fifty
            yield lambda done, total, label, /: report(done, total, cut(label, max(look.width - 52, 8), look))
            return
        begun: list[float] = []

        def patient(done: int, total: int, label: str, /) -> None:
            if label.startswith("loading"):
                begun.append(time.monotonic()) if not begun else None
                if time.monotonic() - begun[0] < _PATIENCE:
                    return
            report(done, total, label)

        yield patient
