"""Where chat templates run: Jinja without reach, and with a meter.

A template is code that came with the weights (CVE-2024-34359, CVE-2026-5760). Three walls:

- the tree is refused at load if it names what no chat template needs (imports, dunders, ``self``);
- Jinja's sandbox keeps attributes private and values unchanged;
- every loop turn, call, filter and operator pays a `Meter` (meter.py), and whatever grows text or lists is
  measured before or right after it is made. No signals, no threads: it works anywhere.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, cast, final

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from cutaway.errors import TemplateError
from cutaway.tokenizers.meter import MIB, Meter

__all__ = ["Sandbox"]

_WIDEST = 10_000  # columns of padding, or turns of a multiplication table


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the model says; for rendering it is nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_FILTERS = """
abs attr batch capitalize center count d default dictsort e escape filesizeformat first float forceescape format
groupby indent int items join last length list lower map max min reject rejectattr replace reverse round safe
select selectattr slice sort string sum title trim truncate unique upper urlencode wordcount
"""
_TEXTUAL = "string tojson e escape forceescape upper lower title capitalize trim center urlencode truncate wordcount"


@final
class Sandbox(ImmutableSandboxedEnvironment):
    """One meter's Jinja. A new one per rendering (`render` in chat.py), so threads share nothing."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, meter: Meter) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._finalize,
            cache_size=0,
            extensions=[loopcontrols, _Generation],
        )
        self.meter = meter
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now
        self.filters = {name: self._metered(name, self.filters[name]) for name in _FILTERS.split()}
        self.filters["tojson"] = self._metered("tojson", _tojson)

    # -- called by what `metered` (in template_tree.py) put into the tree

    def tick(self, chars: int) -> None:
        self.meter.spend(chars)

    def hold(self, value: Any) -> Any:
        if isinstance(value, Namespace):
            raise TemplateError("template puts a namespace into a value")
        return self.meter.kept(value)

    def concat_all(self, parts: list[Any]) -> str:
        texts = [self._text(part) for part in parts]
        self.meter.allow(sum(map(len, texts)))
        return "".join(texts)

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return self.meter.kept(value[start:stop:step])

    # -- called by compiled templates

    def _finalize(self, value: Any) -> Any:
        if isinstance(value, str):
            self.meter.spend(len(value))
        elif isinstance(value, list | tuple | dict | Namespace):
            self.meter.spend(self.meter.weigh(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.spend()
        if operator == "*":
            for box, times in ((left, right), (right, left)):
                if isinstance(box, str | bytes | list | tuple) and isinstance(times, int):
                    self.meter.allow(len(box) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.meter.allow(left.bit_length() * abs(right) * 16)
        elif operator == "%" and isinstance(left, str | bytes):
            self._check_format(left, right)
        return self.meter.kept(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # Jinja wraps a text's format methods; what they belong to is underneath.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if owner is __self:  # put there by template_tree.py; a template cannot name it
            return method(*args)
        __self.meter.spend()
        if isinstance(owner, str | bytes | int):
            args = __self._check_method(owner, method.__name__, args, kwargs)
        if __obj is __self.globals["namespace"] or __obj is __self.globals["dict"]:
            __self.meter.weigh([list(args), kwargs])
        return __self.meter.kept(super().call(__context, __obj, *args, **kwargs))

    def _check_method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if any(isinstance(arg, int) and abs(arg) > _WIDEST for arg in (*args, *kwargs.values())):
            raise TemplateError(f"template calls {name} with too large a number", expected=f"at most {_WIDEST}")
        if name == "translate":
            raise TemplateError("templates may not call translate")
        if name == "expandtabs":
            self.meter.allow(len(owner) * _WIDEST if args or kwargs else len(owner) * 8)
        elif name in ("format", "format_map"):
            self._check_format(owner, [*args, *kwargs.values()])
        elif name == "replace" and len(args) > 1:
            self._check_replace(owner, args[0], args[1])
        elif name == "join" and args:
            parts = list(args[0])
            self.meter.allow(len(owner) * len(parts) + self.meter.weigh(parts))
            return (parts, *args[1:])
        return args

    def _check_format(self, layout: Any, values: Any) -> None:
        """Refuse widths past bearing, also those that come as a value (``*``, ``{:{}}``)."""
        text = layout if isinstance(layout, str) else repr(layout)
        numbers = [int(number) for number in re.findall(r"\d{1,9}", text)] if len(text) < MIB else [MIB]
        given = values if isinstance(values, list | tuple) else [values]
        if "*" in text or re.search(r"\{[^{}]*\{", text):
            numbers += [abs(value) for value in given if isinstance(value, int)]
        if any(number > _WIDEST for number in numbers):
            raise TemplateError("template formats with too large a width", expected=f"at most {_WIDEST}")
        places = text.count("%") + text.count("{")
        weights = [self.meter.weigh(value) for value in given]
        # A value named in the layout may be used at every place, others once.
        each = max(weights, default=0) * places if re.search(r"\{\w|%\(", text) else sum(weights)
        self.meter.allow(len(text) + places * max(numbers, default=0) + each)

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        if isinstance(text, str | bytes) and isinstance(old, type(text)) and isinstance(new, type(text)):
            self.meter.allow(len(text) + cast("Any", text).count(old) * len(new))

    def _metered(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        first = 0 if getattr(run, "jinja_pass_arg", None) is None else 1

        @functools.wraps(run)  # which also carries over what the filter wants to be passed
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.spend()
            return self.meter.kept(run(*args[:first], *self._check_filter(name, args[first:], kwargs), **kwargs))

        return metered

    def _check_filter(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        value, options = args[0], (*args[1:], *kwargs.values())
        if name in ("center", "indent", "batch", "slice", "round", "tojson", "truncate"):
            most = 100 if name in ("round", "tojson", "indent") else _WIDEST
            for option in options:
                size = len(option) if isinstance(option, str) else option
                if isinstance(size, int | float) and abs(size) > most:
                    raise TemplateError(f"template calls {name} with too large a number")
        if name == "indent":
            self.meter.allow(self._text(value).count("\n") * 100)
        elif name == "format":
            self._check_format(self._text(value), list(options))
        elif name == "replace" and len(options) > 1:
            self._check_replace(self._text(value), self._text(options[0]), self._text(options[1]))
        elif name == "sum" and any(isinstance(option, list | tuple) for option in options):
            raise TemplateError("templates may only sum numbers")
        elif name in ("join", "list"):
            parts = list(value)
            glue = len(self._text(options[0])) if name == "join" and options else 0
            self.meter.allow(len(parts) * (glue + 1) + (self.meter.weigh(parts) if name == "join" else 0))
            return (parts, *args[1:])
        elif isinstance(value, list | tuple | dict | Namespace) and name in _TEXTUAL.split():
            self.meter.allow(self.meter.weigh(value))
        return args

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            self.meter.allow(self.meter.weigh(value))
            value = str(value)
        return cast("str", value)


def _raise(message: object = "") -> None:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    if len(layout) > 256 or re.search(r"\d{3}", layout):
        raise TemplateError("template asks for too long a date")
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own would escape for HTML."""
    text = json.dumps(value, indent=indent, separators=separators, sort_keys=sort_keys, ensure_ascii=ensure_ascii)
    return _unescape(text) if ensure_ascii else text


def _unescape(text: str) -> str:
    """Plane 15 as itself: the stand-ins that hide control strings (disguise.py) come from there."""

    def character(pair: re.Match[str]) -> str:
        return chr(0x10000 + ((int(pair[1], 16) - 0xD800) << 10) + int(pair[2], 16) - 0xDC00)

    return re.sub(r"\\u(db[89ab][0-9a-f])\\u(d[c-f][0-9a-f]{2})", character, text)
