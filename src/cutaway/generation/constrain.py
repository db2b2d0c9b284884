"""Answers of a given form: a JSON schema, a regular expression, a grammar or a list of choices.

    what a call asks for ─► Constraint ─► Guides (llguidance, the vocabulary's bytes) ─► a Guide for each answer
                                                                                  mask ▲        │ each chosen token
                                                                logits after penalties, biases ─┘ and rules

llguidance (github.com/guidance-ai/llguidance, an extra) does the parsing, and is imported where it is first needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from cutaway.errors import CutawayError, RequestError
from cutaway.formats.strict_json import parse_json
from cutaway.generation.bounds import check_grammar, check_guidance, check_regex, check_schema, with_room
from cutaway.generation.logits import NEVER
from cutaway.generation.token_bytes import vocabulary
from cutaway.tokenizers.tokenizer import Tokenizer

LIMIT = 1 << 20  # bytes of a schema, expression or grammar
MOST_STATES = 50_000  # of the lexer, 1 to 2 kB each
SPACE = r"[\x20\x0A\x0D\x09]{1,40}"  # between JSON's tokens: bounded, or a model might write nothing else
LONGEST = 200  # characters of what llguidance says
_RULES = {
    "schema": "See github.com/guidance-ai/llguidance, docs/json_schema.md, for what a schema may say.",
    "regex": "The syntax is that of Rust's regex crate: no look-around, no references back; \\ makes a sign plain.",
    "grammar": "See github.com/guidance-ai/llguidance, docs/syntax.md: Lark's syntax, beginning with start: …",
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form an answer must have.

    Attributes:
        kind: the argument that said so: ``schema``, ``regex``, ``grammar`` or ``choices``.
        text: JSON, a regular expression (of choices as well), or Lark.
    """

    kind: str
    text: str


def constraint_of(schema: object, regex: object, grammar: object, choices: object) -> Constraint | None:
    """The one that is asked for, if any.

    Raises:
        RequestError: more than one, or something that cannot be read as such.
    """
    given = {"schema": schema, "regex": regex, "grammar": grammar, "choices": choices}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return None
    kind = names[0]
    if len(names) > 1:
        raise RequestError("an answer has one form", field=kind, expected="one of them", got=", ".join(names))
    text = _schema(schema) if kind == "schema" else _choices(choices) if kind == "choices" else given[kind]
    if not isinstance(text, str) or not text:
        raise RequestError("not a text, or an empty one", field=kind, got=text)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError("holds half a character (a lone surrogate)", field=kind) from error
    if size > LIMIT:
        raise RequestError("is too large", field=kind, expected=f"at most {LIMIT} bytes", got=size)
    if kind in ("regex", "grammar"):
        (check_regex if kind == "regex" else check_grammar)(text)
    return Constraint(kind, text)


def _schema(schema: object) -> str:
    """As JSON that was checked: no key twice, bounded depth; anything at all is ``{}``."""
    if schema is not True and not isinstance(schema, (str, Mapping)):
        hint = "A pydantic model has one: model_json_schema()." if isinstance(schema, type) else None
        wanted = "a mapping, JSON text or True"
        raise RequestError("not a schema", field="schema", expected=wanted, got=schema, hint=hint)
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False, default=dict)
        tree = parse_json(text.encode(), path="schema", limit=LIMIT)
    except (TypeError, ValueError, RecursionError, CutawayError) as error:
        what = error.line() if isinstance(error, CutawayError) else f"is not JSON: {error}"
        hint = "It is the schema itself, not a file's name." if isinstance(schema, str) else None
        raise RequestError(what.removeprefix("schema: "), field="schema", hint=hint) from error
    if tree is True:
        return "{}"
    if not isinstance(tree, dict):
        raise RequestError("not a schema", field="schema", expected="a JSON object", got=tree)
    check_schema(tree)
    check_guidance(tree)
    return text


def _choices(choices: object) -> str:
    """As a regular expression in which everything but letters and digits is written by its number."""
    if not isinstance(choices, (list, tuple)) or not choices:
        raise RequestError("not a list of texts, or an empty one", field="choices", got=choices)
    found = []
    for place, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise RequestError("not a text, or an empty one", field=f"choices/{place}", got=choice)
        found.append("".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in choice))
        if any("\ud800" <= c <= "\udfff" for c in choice):
            raise RequestError("holds half a character (a lone surrogate)", field=f"choices/{place}")
    return f"(?:{'|'.join(found)})"


@final
class Guide:
    """Where one answer stands in its form."""

    def __init__(self, matcher: Any, kind: str, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._kind = kind
        self._ends = ends

    def fork(self) -> Guide:
        """Another one at the same place."""
        return Guide(self._matcher.deep_copy(), self._kind, self._ends)

    def allowed(self, size: int) -> Tensor:
        """Which of the vocabulary's tokens may come next. [vocab]

        Raises:
            RequestError: none, or it takes too much work to tell.
        """
        with _no_panic(self._kind):
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise _failed(self._matcher, self._kind, "cannot go on")
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[:size].astype(bool))

    def take(self, token: int) -> bool:
        """Go on by a token that was allowed; whether the form is complete, and nothing may follow.

        Raises:
            RequestError: it takes too much work to go on.
        """
        if token in self._ends:
            return True
        with _no_panic(self._kind):
            if not self._matcher.consume_token(token):
                raise _failed(self._matcher, self._kind, "cannot go on")
        return bool(self._matcher.is_stopped())


def mask(logits: Tensor, guides: Sequence[Guide]) -> Tensor:
    """Forbid what would break each answer's form. [rows, vocab] → the same

    Raises:
        RequestError: a row has no token left.
    """
    allowed = torch.stack([guide.allowed(logits.shape[1]) for guide in guides]).to(logits.device)
    x = logits.masked_fill(~allowed, NEVER)
    if bool((x.amax(-1) == NEVER).any()):
        hint = "Forbidden and biased tokens, min_tokens and the vocabulary itself leave too little."
        raise RequestError("the form leaves no token to choose", field=guides[0]._kind, hint=hint)
    return x


class Guides:
    """Makes guides of one form for one vocabulary.

    Args:
        constraint: the form.
        tokenizer: of what is written; its tokens' bytes are what the form is about.
        vocab_size: of the model.
        ends: tokens that end an answer: allowed where it is complete, and nowhere else.

    Raises:
        RequestError: llguidance is not installed, refuses the form, or cannot know this vocabulary's bytes.
    """

    def __init__(self, constraint: Constraint, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        library = _library(constraint.kind)
        if not tokenizer.exact:
            raise RequestError("needs tokens whose bytes make up the text, and these do not", field=constraint.kind)
        ends = frozenset(token for token in ends if token < vocab_size)
        self._kind, self._ends = constraint.kind, ends
        limits = library.LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        words = vocabulary(library, tokenizer, vocab_size, ends)
        make = partial(library.LLMatcher, words, log_level=0, limits=limits)
        with _no_panic(self._kind):
            self._first = with_room(lambda: make(_compiled(library, constraint)))
            if not self._first.is_error():
                self._first.compute_bitmask()  # or a form that no text has would be found out by the model's first step
        if self._first.is_error():
            raise _failed(self._first, self._kind, "cannot be used")

    def new(self) -> Guide:
        """One that stands at the beginning."""
        return Guide(self._first.deep_copy(), self._kind, self._ends)


def _library(kind: str) -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        hint = "pip install 'cutaway[grammar]'"
        raise RequestError("needs llguidance, which is not installed", field=kind, hint=hint) from error
    return llguidance


def _compiled(library: ModuleType, constraint: Constraint) -> str:
    make = library.LLMatcher
    if constraint.kind == "schema":
        # A pattern of the schema's own comes before this one; none is wanted where it says that all is tight. What
        # llguidance does not know is refused in any case.
        own = json.loads(constraint.text).get("x-guidance")
        tight = isinstance(own, dict) and own.get("whitespace_flexible") is False
        space = {} if tight else {"whitespace_pattern": SPACE}
        return str(make.grammar_from_json_schema(constraint.text, space, {"lenient": False}))
    return str((make.grammar_from_lark if constraint.kind == "grammar" else make.grammar_from_regex)(constraint.text))


@contextmanager
def _no_panic(kind: str) -> Iterator[None]:
    """A panic of llguidance's is no Exception, and would go past everybody who catches those."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _broken(kind) from error


def _broken(kind: str) -> RequestError:
    return RequestError("llguidance broke down over it", field=kind)


def _failed(matcher: Any, kind: str, what: str) -> RequestError:
    if "NoExtensionBias" in matcher.get_error():
        return RequestError("no text has this form", field=kind)
    if "panic:" in matcher.get_error():
        return _broken(kind)
    said = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return RequestError(f"{what}: {said[:LONGEST]}", field=kind, hint=_RULES.get(kind))
