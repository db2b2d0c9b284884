"""A call's arguments over a checkpoint's own settings."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from cutaway.cache import check_kv_dtype
from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids, flag, number, tokens, whole
from cutaway.generation.constrain import constraint_of
from cutaway.generation.options import DEFAULTS, Options, check_names
from cutaway.generation.rules import Rules
from cutaway.generation.sampling import Sampling
from cutaway.spec import GenerationSettings

__all__ = ["Sampling", "resolve"]

MOST_CHOICES = 1024  # answers to one prompt: each is a row of the batch and of the cache, as each beam is
DEFAULT_TOKENS = 256
LENGTH_POWERS = 50.0  # of a million tokens, still a number


def resolve(own: GenerationSettings, vocab_size: int, **options: Unpack[Options]) -> Sampling:
    """Check a call's options, and take what it leaves out from the checkpoint.

    Raises:
        RequestError: an unknown name, or a value that makes no sense, by name.
    """
    check_names(options)
    given: Callable[..., Any] = options.get
    max_tokens, max_length = _lengths(own, given("max_tokens", DEFAULTS["max_tokens"]))
    n = whole("n", given("n", DEFAULTS["n"]), 1, MOST_CHOICES)
    seed = given("seed")
    for name in ("logprobs", "processed_logprobs", "prompt_logprobs"):
        if given(name) is not None:
            whole(name, given(name), 0)
    texts, ids = _stops(given("stop"), vocab_size)
    if seed is not None:
        whole("seed", seed, -(2**63), 2**63 - 1)
    beams, heat = _search(own, given("num_beams"), given("temperature"))
    if beams > 1 and n > beams:
        raise RequestError("more answers than beams", field="n", expected=f"at most {beams}", got=n)
    if beams > 1 and texts:
        hint = "Beams end at token ids. Give those, or num_beams=1."
        raise RequestError("stop texts are not supported with beams", field="stop", got=list(texts), hint=hint)
    constraint = constraint_of(given("schema"), given("regex"), given("grammar"), given("choices"))
    if beams > 1 and constraint is not None:
        hint = "Give num_beams=1."
        raise RequestError("beams know no form of an answer", field=constraint.kind, got=f"{beams} beams", hint=hint)
    words, banned = _words(given("bad_words"), vocab_size)
    min_tokens = given("min_tokens")
    # A temperature of one's own is a wish to sample as the model does, so the rest of its settings hold too.
    return Sampling(
        max_tokens=max_tokens,
        max_length=max_length,
        temperature=heat,
        top_k=whole("top_k", _or(given("top_k"), own.top_k), 0),
        top_p=number("top_p", _or(given("top_p"), own.top_p), 0, 1),
        min_p=number("min_p", _or(given("min_p"), own.min_p), 0, 1),
        temperature_last=flag("temperature_last", given("temperature_last", DEFAULTS["temperature_last"])),
        repetition_penalty=number("repetition_penalty", _or(given("repetition_penalty"), own.repetition_penalty), 1e-6),
        frequency_penalty=number("frequency_penalty", _or(given("frequency_penalty"), 0.0)),
        presence_penalty=number("presence_penalty", _or(given("presence_penalty"), 0.0)),
        logit_bias=_biases(given("logit_bias"), vocab_size),
        rules=Rules(
            no_repeat_ngram_size=whole(
                "no_repeat_ngram_size", _or(given("no_repeat_ngram_size"), own.no_repeat_ngram_size), 0
            ),
            bad_words=own.bad_words_ids + banned,
            # As in transformers, a least length of the answer takes the place of one of the text.
            min_length=own.min_length if min_tokens is None and not own.min_new_tokens else 0,
            min_tokens=whole("min_tokens", _or(min_tokens, own.min_new_tokens), 0),
            # An answer with a form begins and ends as that says.
            forced_bos_id=own.forced_bos_id if constraint is None else None,
            forced_eos_ids=own.forced_eos_ids if constraint is None else (),
            suppress_ids=own.suppress_ids,
            begin_suppress_ids=own.begin_suppress_ids,
        ),
        bad_words=words,
        stop=texts,
        stop_ids=frozenset(own.eos_ids) | frozenset(ids),
        seed=secrets.randbits(63) if seed is None else seed,
        n=n,
        logprobs=given("logprobs"),
        processed_logprobs=given("processed_logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        num_beams=beams,
        length_penalty=number(
            "length_penalty", _or(given("length_penalty"), own.length_penalty), -LENGTH_POWERS, LENGTH_POWERS
        ),
        early_stopping=_early(_or(given("early_stopping"), own.early_stopping)),
        deterministic=flag("deterministic", given("deterministic", DEFAULTS["deterministic"])),
        kv_dtype=check_kv_dtype(given("kv_dtype")),
        renormalize=own.renormalize,
        constraint=constraint,
    )


def _or(value: object, otherwise: object) -> object:
    """What a call says, or what the checkpoint does."""
    return otherwise if value is None else value


def _lengths(own: GenerationSettings, max_tokens: object) -> tuple[int | None, int | None]:
    """Most tokens of the answer, and of prompt and answer together, if a call leaves its length out."""
    if max_tokens is None:
        return None, None
    if not (isinstance(max_tokens, str) and max_tokens == "auto"):
        return whole("max_tokens", max_tokens, 0), None
    if own.max_new_tokens is None and own.max_length is not None:
        return None, own.max_length
    return own.max_new_tokens or DEFAULT_TOKENS, None


def _search(own: GenerationSettings, num_beams: int | None, temperature: float | None) -> tuple[int, float]:
    """How many beams, and how hot. Beams search and a temperature draws: what a call names counts, both are refused."""
    beams = whole("num_beams", own.num_beams if num_beams is None else num_beams, 1, MOST_CHOICES)
    heat = number("temperature", own.temperature if temperature is None else temperature, 0)
    if beams == 1 or heat == 0:
        return beams, heat
    if temperature is None:
        return beams, 0.0
    if num_beams is None:
        return 1, heat
    hint = "Leave one of the two out: beams search for the likeliest answer, a temperature draws one."
    raise RequestError("beams are not drawn", field="num_beams", expected="1 with a temperature", got=beams, hint=hint)


def _early(value: object) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value == "never"):
        return value
    raise RequestError("unknown value", field="early_stopping", expected='True, False or "never"', got=value)


def _words(words: object, vocab_size: int) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Forbidden texts, and forbidden sequences of ids."""
    listed = [words] if isinstance(words, (str, int)) else [] if words is None else words
    if not isinstance(listed, (list, tuple, set, frozenset)):
        raise RequestError("not a list of texts or of token ids", field="bad_words", got=words)
    texts, banned = [], []
    for place, word in enumerate(listed):
        if isinstance(word, str) and word:
            texts.append(word)
        elif isinstance(word, (list, tuple)):
            banned.append(tuple(check_ids(word, vocab_size, f"bad_words/{place}")))
        elif isinstance(word, str):
            raise RequestError("an empty text cannot be forbidden", field=f"bad_words/{place}")
        else:
            banned.append((tokens(f"bad_words/{place}", [word], vocab_size)[0],))
    return tuple(texts), tuple(banned)


def _stops(stop: object, vocab_size: int) -> tuple[tuple[str, ...], list[int]]:
    """Texts and ids, apart."""
    words = [stop] if isinstance(stop, (str, int)) else [] if stop is None else stop
    if not isinstance(words, (list, tuple, set, frozenset)):
        raise RequestError("a stop is a text, not empty, or a token id, or a list of these", field="stop", got=stop)
    texts = tuple(word for word in words if isinstance(word, str))
    if "" in texts:
        raise RequestError("an empty stop would end every answer before it begins", field="stop")
    return texts, tokens("stop", [word for word in words if not isinstance(word, str)], vocab_size)


def _biases(biases: object, vocab_size: int) -> dict[int, float]:
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError("not a mapping", field="logit_bias", expected="token id → number", got=biases)
    tokens("logit_bias", list(biases), vocab_size)
    return {token: number(f"logit_bias/{token}", bias) for token, bias in biases.items()}
