"""Who guesses ahead in a call, and whether that can be any use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet

from cutaway.errors import RequestError
from cutaway.generation.checks import whole
from cutaway.models import Transformer
from cutaway.spec import ModelSpec
from cutaway.tokenizers.tokenizer import Tokenizer

MOST_TOKENS = 64  # guessed at a time; a ring goes back by 256
DEFAULT_TOKENS = 15

_ALIKE: WeakKeyDictionary[Tokenizer, WeakSet[Tokenizer]] = WeakKeyDictionary()


@runtime_checkable
class Guesser(Protocol):
    """A ``cutaway.Model``, as far as guessing goes."""

    transformer: Transformer
    tokenizer: Tokenizer | None


def network_of(model: Transformer) -> Transformer:
    """The model, if it is no ``cutaway.Model`` around one.

    Raises:
        RequestError: it is.
    """
    if isinstance(model, Guesser):
        raise RequestError("a session reads with the network itself", field="model", hint="Give model.transformer.")
    return model


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who guesses, None for what stands in the text already; and how many tokens at a time, at most."""

    model: Transformer | None = None
    most: int = DEFAULT_TOKENS


def drafting(
    draft: object, draft_tokens: object, model: Transformer, tokenizer: Tokenizer | None, beams: int = 1
) -> Drafting | None:
    """What a call asks for, if it is any use.

    Args:
        draft: ``"prompt"``, a :class:`Guesser`, or None.
        draft_tokens: most tokens at a time; None for as many as is usual.
        model, tokenizer: what answers.
        beams: how many answers are being searched for at a time.

    Raises:
        RequestError: no draft, beams, or a model with other tokens.
    """
    if draft is None:
        if draft_tokens is not None:
            hint = 'Give draft="prompt", or a model.'
            raise RequestError("there is no draft", field="draft_tokens", got=draft_tokens, hint=hint)
        return None
    most = DEFAULT_TOKENS if draft_tokens is None else whole("draft_tokens", draft_tokens, 1, MOST_TOKENS)
    if beams > 1:
        raise RequestError("beams take no draft", field="draft", got=f"{beams} beams", hint="Give num_beams=1.")
    if isinstance(draft, str) and draft == "prompt":
        return Drafting(None, most)
    if not isinstance(draft, Guesser):
        named = f"cutaway.load({draft!r}) makes one of a name." if isinstance(draft, str) else None
        raise RequestError("no draft", field="draft", expected='"prompt" or a cutaway.Model', got=draft, hint=named)
    _check_kind(draft.transformer.spec, model.spec)
    if draft.tokenizer is not None and tokenizer is not None:
        _check_words(draft.tokenizer, tokenizer)
        _check_words(draft.tokenizer.target, tokenizer.target)
    return Drafting(draft.transformer, most)


def _check_kind(spec: ModelSpec, target: ModelSpec) -> None:
    if not spec.generates:
        raise RequestError("the draft does not say what comes next", field="draft", got=spec.family)
    if (spec.source is None) is not (target.source is None):
        what = "an encoder–decoder's draft is one too, and another model's is none"
        raise RequestError(what, field="draft", got=spec.family)
    for name in ("vocab_size", "source_vocab_size"):
        ours, theirs = getattr(spec, name) or spec.vocab_size, getattr(target, name) or target.vocab_size
        if ours != theirs:
            raise RequestError("the draft has another vocabulary", field="draft", expected=f"{theirs} tokens", got=ours)


def _check_words(words: Tokenizer, target: Tokenizer) -> None:
    """Compare the bytes of tokens that both vocabularies have, once for each pair of them."""
    known = _ALIKE.setdefault(target, WeakSet())
    if words is target or words in known:
        return
    for index in range(min(words.vocab_size, target.vocab_size)):
        ours, theirs = words.token_bytes(index), target.token_bytes(index)
        if ours and theirs and ours != theirs:
            what = f"token {index} is another one in the draft's vocabulary"
            raise RequestError(what, field="draft", expected=_shown(theirs), got=_shown(ours))
    known.add(words)


def _shown(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
