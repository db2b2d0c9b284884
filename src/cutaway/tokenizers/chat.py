"""Chat templates: messages to text, and to ids in which control tokens are the template's alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, final

from cutaway.errors import CutawayError, LimitExceeded, TemplateError
from cutaway.tokenizers.disguise import Disguise, plain

if TYPE_CHECKING:
    from cutaway.tokenizers.tokenizer import Tokenizer

__all__ = ["NO_TEMPLATE", "ChatTemplate", "LateTemplate", "encode_chat"]

_LONGEST = 1 << 20
_MOST_WORDS = 20_000  # of Jinja; a large template has 3,000, and compiling takes 30 µs for each


@final
class ChatTemplate:
    """A compiled chat template. Rendering is safe from several threads.

    Args:
        source: Jinja, as in tokenizer_config.json.
        path, field: where it came from, for errors.
        with_tools: the one to use instead when tools are given (some checkpoints have two).

    Errors: LimitExceeded past 1 MiB; TemplateError for bad or unsafe Jinja, with the line.
    """

    def __init__(
        self,
        source: str,
        *,
        path: str | PathLike[str] | None = None,
        field: str | None = None,
        with_tools: ChatTemplate | None = None,
    ) -> None:
        if not isinstance(source, str):
            raise TemplateError("is not text", path=path, field=field, got=type(source).__name__)
        if len(source) > _LONGEST:
            raise LimitExceeded(
                "template is too long", path=path, field=field, expected=f"at most {_LONGEST}", got=len(source)
            )
        self.source: Final = source
        self.with_tools: Final = with_tools
        self._code: Final = _compile(source, path=path, field=field)

    def __repr__(self) -> str:
        return f"ChatTemplate({len(self.source)} characters)"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        bos_token: str = "",
        eos_token: str = "",
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as one text.

        Errors: TemplateError if the template refuses the messages, fails, or uses too much:
        1 M steps, 1 s, or more output than 8 characters for each one given (and 64 Ki, up to 8 Mi).
        """
        if tools and self.with_tools is not None:
            return self.with_tools.render(messages, bos_token, eos_token, add_generation_prompt, tools, **kwargs)
        inputs = plain({"messages": list(messages), "tools": tools, "documents": None, **kwargs})
        return self._run(
            {**inputs, "bos_token": bos_token, "eos_token": eos_token, "add_generation_prompt": add_generation_prompt}
        )

    def _run(self, context: dict[str, Any]) -> str:
        from jinja2.environment import Template

        from cutaway.tokenizers.meter import Meter
        from cutaway.tokenizers.sandbox import Sandbox

        size = Meter(1 << 40)
        meter = Meter(len(self.source) + sum(size.weigh(value) for value in context.values()))
        environment = Sandbox(meter)
        template = Template.from_code(environment, self._code, environment.make_globals(None))
        out: list[str] = []
        length = 0
        try:
            for part in template.generate(context):
                out.append(part)
                length += len(part)
                meter.allow(length)
        except TemplateError:
            raise
        except RecursionError:
            raise TemplateError("template calls itself without end") from None
        except Exception as error:
            hint = "Most templates want a role and a content of each message." if "'content'" in str(error) else None
            raise TemplateError(f"template failed: {error}", got=type(error).__name__, hint=hint) from error
        return "".join(out)


@final
class LateTemplate:
    """A file's chat template, compiled when it is first asked for: a model that completes a text does without.

    Args:
        make: compiles it; gives None where the file has none, and raises where it is bad.
    """

    def __init__(self, make: Callable[[], ChatTemplate | None]) -> None:
        self._make = make

    @cached_property
    def _found(self) -> ChatTemplate | CutawayError | None:
        try:
            return self._make()
        except CutawayError as error:  # no reason not to complete text
            return error

    @property
    def made(self) -> ChatTemplate | None:
        """The template, if there is one that is good."""
        return self._found if isinstance(self._found, ChatTemplate) else None

    @property
    def error(self) -> CutawayError | None:
        """What is wrong with it, if anything is."""
        return self._found if isinstance(self._found, CutawayError) else None

    def wanted(self) -> ChatTemplate:
        """The template. Errors: what is wrong with it; TemplateError where there is none."""
        if self.made is None:
            raise self.error or TemplateError("this model has no chat template", hint="give it a plain prompt")
        return self.made


NO_TEMPLATE: Final = LateTemplate(lambda: None)


def _compile(source: str, *, path: str | PathLike[str] | None, field: str | None) -> CodeType:
    from jinja2 import TemplateSyntaxError

    from cutaway.tokenizers.meter import Meter
    from cutaway.tokenizers.sandbox import Sandbox
    from cutaway.tokenizers.template_tree import metered, refuse_unsafe

    # Constant expressions run while compiling, hence a meter here too.
    environment = Sandbox(Meter(len(source), seconds=10.0))
    try:
        words = sum(1 for _ in itertools.islice(environment.lex(source), _MOST_WORDS + 1))
        if words > _MOST_WORDS:
            most = f"at most {_MOST_WORDS}"
            raise LimitExceeded("template has too many parts", path=path, field=field, expected=most)
        tree = environment.parse(source)
        refuse_unsafe(tree, path=path, field=field)
        code: CodeType = environment.compile(metered(tree, environment))
    except (TemplateError, LimitExceeded):
        raise
    except TemplateSyntaxError as error:
        raise TemplateError(f"bad template: {error.message} in line {error.lineno}", path=path, field=field) from error
    except RecursionError:
        raise TemplateError("bad template: nested too deeply", path=path, field=field) from None
    except Exception as error:  # Python's own compiler has limits too: blocks in blocks, digits of a number
        raise TemplateError(f"bad template: {error}", path=path, field=field) from error
    return code


def _unforged(
    tokenizer: Tokenizer, template: ChatTemplate, disguise: Disguise, inputs: dict[str, Any], text: str
) -> str:
    """The rendered text, unless the template made control tokens of what people wrote (by ``lower``, ``replace`` …).

    That shows when every character that could begin one is hidden: then there are fewer. Such a text is used instead.
    """
    hidden = disguise.hide(inputs, every=True)
    if hidden == disguise.hide(inputs):
        return text
    thorough = template.render(**{**tokenizer.names, **hidden})

    def count(rendered: str) -> Counter[int]:
        return Counter(token.id for token in tokenizer.located(rendered, "own") if token.special)

    return thorough if count(text) - count(thorough) else text


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **kwargs: Any
) -> list[int]:
    """Ids of a conversation. What people wrote (messages, tools, ``kwargs``) never becomes a control token.

    Where nobody typed a control string, these are the ids of the rendered text.
    """
    inputs = plain({"messages": list(messages), **kwargs})
    sources = template.source + (template.with_tools.source if template.with_tools else "")
    disguise = Disguise(tokenizer.control_strings, sources, inputs)
    text = template.render(**{**tokenizer.names, **disguise.hide(inputs)})
    text = _unforged(tokenizer, template, disguise, inputs, text)
    if not disguise.worn(text):
        return tokenizer.encode_parts([text], special=True, lead="own")[0]
    # The disguised text shows where the template's own control tokens are. What lies between them
    # is encoded as it was written, each stretch whole, so that merges cross from template to user text.
    ids: list[int] = []
    at = 0
    for token in tokenizer.located(text, "own"):
        start, end = token.start or 0, token.end or 0
        if token.special and (token.id != tokenizer.unk_id or token.text == text[start:end]):
            ids += _plain(tokenizer, disguise.reveal(text[at:start]), first=at == 0)
            ids.append(token.id)
            at = end
    return ids + _plain(tokenizer, disguise.reveal(text[at:]), first=at == 0)


def _plain(tokenizer: Tokenizer, text: str, *, first: bool) -> list[int]:
    return tokenizer.encode_parts([text], special=False, lead="own" if first else "middle")[0] if text else []
