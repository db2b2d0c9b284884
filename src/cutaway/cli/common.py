"""What verbs share: options, output, and getting hold of a model. Imports nothing heavy before it is used."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cutaway.cli.text import Look, look_at_stdout
from cutaway.errors import RequestError, TokenizerError

if TYPE_CHECKING:
    from cutaway.checkpoints.progress import Progress
    from cutaway.checkpoints.resolve import Resolved
    from cutaway.model import Model

F = TypeVar("F", bound=Callable[..., Any])
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_PATIENCE = 2.0  # seconds of loading that need no word where there is no terminal


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

        with atomic_write(self.out) as file:
            file.write(text.encode("utf-8", "backslashreplace"))

    def emit_json(self, value: Any) -> None:
        """One JSON object; with --jsonl and a list, one a line."""
        if self.jsonl and isinstance(value, list):
            self.emit("".join(to_json(item) + "\n" for item in value))
        else:
            self.emit(to_json(value, indent=None if self.jsonl else 2) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: NaN and infinity, which it cannot say, become null."""
    return json.dumps(_finite(value), ensure_ascii=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────


class Count(click.ParamType):
    """A whole number, or a size: ``256``, ``4k``, ``1.5M``, ``2GiB`` (k, M, G are thousands; Ki, Mi, Gi are 1024)."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]+(?:[._][0-9]+)?|\.[0-9]+)\s*([kmgb]|[kmg]i)?b?", str(value).strip().lower())
        if found is None:
            self.fail(f"{value!r} is not a number such as 256, 4k, 1.5M or 2GiB.", param, ctx)
        number = float(found[1].replace("_", "")) * _UNITS[found[2] or ""]
        if number != int(number) or number > 2**53:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return int(number)


class Device(click.ParamType):
    """``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | None:
        """The device's name, None for auto."""
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", str(value)):
            self.fail(f"{value!r} is not one of auto, cpu, cuda, cuda:N, mps.", param, ctx)
        return None if value == "auto" else str(value)


COUNT = Count()


def _complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from cutaway.checkpoints.catalog import ENTRIES

    return [entry.name for entry in ENTRIES if entry.name.startswith(incomplete)]


def _kept(*names: str, **attributes: Any) -> Callable[[F], F]:
    """An option whose value goes into the `Settings` of the command line instead of the verb's arguments."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is not None:
            setattr(ctx.ensure_object(Settings), str(param.name), value)
        return value

    return click.option(*names, expose_value=False, callback=keep, **attributes)


_DTYPES = click.Choice(["auto", "fp32", "bf16", "fp16"])
_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "model": _kept(
        "-m",
        "--model",
        metavar="MODEL",
        help="A catalogue name, hub id, folder, .gguf or .safetensors. [smollm2]",
        shell_complete=_complete_model,
    ),
    "seed": _kept("--seed", type=int, help="Same seed, same draw."),
    "device": _kept("--device", type=Device(), metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps. [auto]"),
    "dtype": _kept("--dtype", type=_DTYPES, help="Numbers to compute with. [auto: fp32 on a CPU]"),
    "threads": _kept("--threads", type=click.IntRange(1, 4096), metavar="N", help="CPU threads."),
    "offline": _kept("--offline", is_flag=True, default=None, help="Use only what is here."),
    "revision": _kept("--revision", metavar="REV", help="Branch, tag or commit of a hub id."),
    "json": _kept("--json", is_flag=True, default=None, help="One JSON object; errors as JSON too."),
    "jsonl": _kept("--jsonl", is_flag=True, default=None, help="One JSON object a line."),
    "out": _kept("-o", "--out", metavar="PATH", help="Write the data there, whole or not at all."),
    "quiet": _kept("-q", "--quiet", is_flag=True, default=None, help="No progress, notes or warnings."),
    "verbose": _kept("-v", "--verbose", count=True, help="Say more."),
    "debug": _kept("--debug", is_flag=True, default=None, help="Show the traceback of an error."),
}
_OUTPUT = ("json", "out", "quiet", "verbose", "debug")
_GROUPS = {
    "output": _OUTPUT,
    "lines": ("jsonl", *_OUTPUT),
    "find": ("offline", "revision"),
    "load": ("device", "dtype", "threads", "offline", "revision"),
}


def shared(*words: str) -> Callable[[F], F]:
    """A decorator that adds shared options, by name or by group, and hands the verb its `Settings` first."""
    names = [name for word in words for name in _GROUPS.get(word, (word,))]

    def add(function: F) -> F:
        decorated: Any = click.make_pass_decorator(Settings, ensure=True)(function)
        for name in reversed(names):
            decorated = _OPTIONS[name](decorated)
        return decorated  # type: ignore[no-any-return]

    return add


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
            raise RequestError("nothing came on standard input", field="prompt", hint="give a text, or pipe one in")
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

    with as_input(), progress(settings) as report:
        return resolve(
            name or settings.model, revision=settings.revision, offline=settings.offline, progress=report
        )


def load_model(settings: Settings) -> Model:
    """The model of --model, as the other options want it."""
    import torch

    from cutaway.model import load

    if settings.threads:
        torch.set_num_threads(settings.threads)
    _check_device(settings.device)
    with as_input(), progress(settings) as report:
        return load(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            revision=settings.revision,
            offline=settings.offline,
            progress=report,
        )


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
def progress(settings: Settings) -> Iterator[Progress]:
    """Transfers and loads, told on standard error; a quick load into a pipe or log is not worth a line."""
    from cutaway.checkpoints.progress import show_progress

    silent = settings.quiet or not sys.stderr
    with show_progress(silent) as report:
        if silent or sys.stderr.isatty():
            yield report
            return
        begun: list[float] = []

        def patient(done: int, total: int, label: str, /) -> None:
            if label.startswith("loading"):
                begun.append(time.monotonic()) if not begun else None
                if time.monotonic() - begun[0] < _PATIENCE:
                    return
            report(done, total, label)

        yield patient
