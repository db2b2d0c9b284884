"""Shared options, and the types that numbers and devices are read with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

from cutaway.cli.common import Settings

__all__ = ["COUNT", "Early", "F", "Number", "Text", "complete_model", "kv_dtype", "shared"]

F = TypeVar("F", bound=Callable[..., Any])
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Count(click.ParamType):  # type: ignore[type-arg]  # click before 8.4 takes none
    """A whole number, or a size: ``256``, ``4k``, ``1.5M``, ``2GiB`` (k, M, G are thousands; Ki, Mi, Gi are 1024)."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]+(?:[._][0-9]+)?|\.[0-9]+)\s*([kmgb]|[kmg]i)?b?", str(value).strip().lower())
        if found is None:
            raise click.BadParameter(f"{value!r} is not a number such as 256, 4k, 1.5M or 2GiB.", ctx, param)
        number = float(found[1].replace("_", "")) * _UNITS[found[2] or ""]
        if number != int(number) or number > 2**53:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return int(number)


class Number(click.ParamType):  # type: ignore[type-arg]
    """A number within bounds; neither NaN nor infinity. What it lets through, the model takes."""

    name = "number"

    def __init__(self, low: float, high: float = math.inf, *, whole: bool = False) -> None:
        self._low = low
        self._high = high
        self._kind = int if whole else float

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        try:
            number = self._kind(value)
        except ValueError:
            self.fail(f"{value!r} is not a {'whole ' if self._kind is int else ''}number.", param, ctx)
        if not (self._low <= number <= self._high and math.isfinite(number)):
            bounds = f"at least {self._low:g}" if math.isinf(self._high) else f"{self._low:g} to {self._high:g}"
            self.fail(f"{value!r} is not a number in range: {bounds}.", param, ctx)
        return number


class Text(click.ParamType):  # type: ignore[type-arg]
    """A text that is not empty."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text."""
        return str(value) or self.fail("the text is empty.", param, ctx)


class Early(click.ParamType):  # type: ignore[type-arg]
    """When beams end: ``true``, ``false`` or ``never``, as checkpoints have it."""

    name = "early"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool | str:
        """The value."""
        words: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
        word = str(value).lower()
        return words[word] if word in words else self.fail(f"{value!r} is not true, false or never.", param, ctx)


class Device(click.ParamType):  # type: ignore[type-arg]
    """``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | None:
        """The device's name, None for auto."""
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", str(value)):
            self.fail(f"{value!r} is not one of auto, cpu, cuda, cuda:N, mps.", param, ctx)
        return None if value == "auto" else str(value)


COUNT = Count()
kv_dtype = click.option(
    "--kv-dtype",
    type=click.Choice(["int8"]),
    help="Keep keys and values in eight bits: a fourth of fp32's memory.",
)


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Catalogue names, for a shell."""
    from cutaway.checkpoints.catalog import ENTRIES

    return [entry.name for entry in ENTRIES if entry.name.startswith(incomplete)]


def _kept(*names: str, **attributes: Any) -> Callable[[F], F]:
    """An option whose value goes into the `Settings` of the command line instead of the verb's arguments."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is not None:
            setattr(ctx.ensure_object(Settings), str(param.name), value)
        return value

    return click.option(*names, expose_value=False, callback=keep, **attributes)


def _model(default: str) -> Callable[[F], F]:
    says = f"A catalogue name, hub id, folder, .gguf or .safetensors. {default}"
    return _kept("-m", "--model", metavar="MODEL", help=says, shell_complete=complete_model)


_BLOCKS = click.Choice(["q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "int8"])
_DTYPES = click.Choice(["auto", "fp32", "bf16", "fp16"])
_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "model": _model("[smollm2]"),
    "sentences": _model("[all-MiniLM-L6-v2]"),
    "needed": _model("[must be given]"),
    "seed": _kept("--seed", type=Number(-(2**63), 2**63 - 1, whole=True), metavar="N", help="Same seed, same draw."),
    "device": _kept("--device", type=Device(), metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps. [auto]"),
    "dtype": _kept("--dtype", type=_DTYPES, help="Numbers to compute with. [auto: fp32 on a CPU]"),
    "quantize": _kept("--quantize", type=_BLOCKS, metavar="TYPE", help="Matrices as q8_0 … q4_k, or int8 products."),
    "threads": _kept("--threads", type=click.IntRange(1, 4096), metavar="N", help="CPU threads."),
    "offline": _kept("--offline", is_flag=True, default=None, help="Use only what is here."),
    "revision": _kept("--revision", metavar="REV", help="Branch, tag or commit of a hub id."),
    "json": _kept("--json", is_flag=True, default=None, help="One JSON object; errors as JSON too."),
    "jsonl": _kept("--jsonl", is_flag=True, default=None, help="One JSON object a line."),
    "out": _kept("-o", "--out", type=Text(), metavar="PATH", help="Write the data there, whole or not at all."),
    "quiet": _kept("-q", "--quiet", is_flag=True, default=None, help="No progress, notes or warnings."),
    "verbose": _kept("-v", "--verbose", count=True, help="Say more."),
    "debug": _kept("--debug", is_flag=True, default=None, help="Show the traceback of an error."),
}
_OUTPUT = ("json", "out", "quiet", "verbose", "debug")
_GROUPS = {
    "output": _OUTPUT,
    "lines": ("jsonl", *_OUTPUT),
    "find": ("offline", "revision"),
    "load": ("device", "dtype", "quantize", "threads", "offline", "revision"),
}


def shared(*words: str) -> Callable[[F], F]:
    """A decorator that adds shared options, by name or by group, and hands the verb its `Settings` first."""
    names = [name for word in words for name in _GROUPS.get(word, (word,))]

    def add(function: F) -> F:
        decorated: Any = click.make_pass_decorator(Settings, ensure=True)(function)
        for name in reversed(names):
            decorated = _OPTIONS[name](decorated)
        return cast(F, decorated)

    return add
