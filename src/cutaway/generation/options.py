"""What a call of generate may ask for: each option's name, type and meaning, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

from cutaway.cache import KvDtype
from cutaway.errors import RequestError
from cutaway.generation.drafting import Guesser
from cutaway.generation.session import Session

__all__ = ["DEFAULTS", "Options", "Words", "check_names", "takes_options"]

Words: TypeAlias = str | int | Sequence[str | int | Sequence[int]]
F = TypeVar("F", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """How to choose tokens, when to stop, and what to report.

    Attributes:
        max_tokens: most tokens to produce; None for as many as the model was trained for; "auto" for the
            checkpoint's ``max_new_tokens``, or an encoder–decoder's ``max_length``, or else 256.
        temperature: 0 is greedy; None is the checkpoint's own setting, as for the next ones.
        top_k, top_p, min_p: keep the k best; the likeliest that reach p; those at least p times as likely as
            the best. They come in this order, after the temperature.
        temperature_last: they come before it, as in some other programs.
        repetition_penalty: > 1 makes tokens of prompt and answer less likely again.
        frequency_penalty, presence_penalty: taken off for each time, and once, a token was produced.
        logit_bias: token id → added to its logit.
        bad_words: texts, token ids or lists of these that are not produced, beside the checkpoint's own.
        no_repeat_ngram_size: no sequence of so many tokens comes twice in prompt and answer.
        min_tokens: before so many, no end token and no id of ``stop`` is chosen. A stop text ends at any time.
        stop: texts or token ids that end the answer, beside the checkpoint's own end tokens.
        seed: same seed, same draw, whatever else is in the batch.
        n: answers to each prompt; of beams, the best so many of them.
        logprobs: how many likeliest tokens to report at each place of the answer; 0 reports the chosen ones only.
            These are the model's own, before anything here changes or filters them.
        processed_logprobs: the same under the distribution that a token is chosen from: after penalties, biases,
            rules and form, and where it is drawn, after temperature, top-k, top-p and min-p. What they forbid is not
            listed. Of beams, what the answers' scores are sums of.
        prompt_logprobs: the same of the prompt, as the model has it; with ``max_tokens=0`` that is all.
        num_beams: > 1 searches for the likeliest answers, so many at a time, as transformers does; that goes
            with no temperature and no stop texts. A temperature > 0 and no ``num_beams`` draws, whatever the
            checkpoint's own number is. None is the checkpoint's own, as for the next ones.
        length_penalty: answers are compared by log-probability / length ** this; > 0 is for longer ones.
        early_stopping: True ends at ``num_beams`` answers, False when the best running one, as long as it is,
            is no better than those, "never" when none could be at any length.
        deterministic: the same request gives the same tokens and the same bits of every log-probability, alone or
            in any batch, whatever was kept of its beginning, with any number of threads. It costs time, and is
            refused where this machine or this model cannot keep it.
        kv_dtype: ``"int8"`` keeps keys and values in eight bits. They take about a quarter of the memory that they
            take as fp32, and log-probabilities move a little: see ``benchmarks/int8_cache.py``.
        schema, regex, grammar, choices: the whole answer is JSON of this schema (a mapping, JSON text, or True for
            any JSON), matches this expression (Rust's syntax), this grammar (Lark, as llguidance takes it), or is
            one of these texts. One of the four, without beams; needs ``pip install 'cutaway[grammar]'``. What
            ends at ``max_tokens`` or at a stop text (``stop``) may be cut short.
        draft: who guesses the next tokens, which are then read in one pass: a smaller model of the same vocabulary,
            or "prompt": what followed the last tokens where the text had them before. The answer is the same as
            without, but for near-ties (none with ``deterministic``), and comes in fewer passes.
        draft_tokens: most tokens guessed at a time; None for 15.
        session: a :class:`cutaway.Session` of one row, for one answer to one prompt, which is the whole text as ever.
            What it has read of the prompt's beginning is not read again, and it ends with prompt and answer, but for
            the last token. ``Session(…, steady=True)`` goes with ``deterministic``.
    """

    max_tokens: int | Literal["auto"] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    temperature_last: bool
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Words | None
    no_repeat_ngram_size: int | None
    min_tokens: int | None
    stop: str | int | Sequence[str | int] | None
    seed: int | None
    n: int
    logprobs: int | None
    processed_logprobs: int | None
    prompt_logprobs: int | None
    num_beams: int | None
    length_penalty: float | None
    early_stopping: bool | str | None
    deterministic: bool
    kv_dtype: KvDtype | None
    schema: Mapping[str, Any] | str | bool | None
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    draft: Guesser | Literal["prompt"] | None
    draft_tokens: int | None
    session: Session | None


# What an option that is left out stands for, where that is not None.
DEFAULTS: Mapping[str, Any] = {"max_tokens": "auto", "temperature_last": False, "n": 1, "deterministic": False}

# What others call it.
_ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "output_scores": "processed_logprobs",
    "echo": "prompt_logprobs",
    "do_sample": "temperature (0 is greedy)",
    "num_return_sequences": "n",
    "bad_words_ids": "bad_words",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "assistant_model": "draft",
    "prompt_lookup_num_tokens": 'draft="prompt"',
    "num_assistant_tokens": "draft_tokens",
    "past_key_values": "session",
    "edits": "model.trace, which takes edits and max_tokens",
}


def check_names(options: Mapping[str, Any]) -> None:
    """Refuse options that there are not.

    Raises:
        RequestError: the first of them; the hint has the nearest name.
    """
    known = Options.__annotations__
    for name in options.keys() - known.keys():
        near = _ELSEWHERE.get(name) or next(iter(get_close_matches(name, known, n=1)), None)
        raise RequestError("unknown argument", field=name, hint=near and f"Did you mean {near}?")


def takes_options(function: F) -> F:
    """List the options one by one in ``help`` and in what completes a call, as if the signature spelt them out.

    Type checkers know them from ``**options: Unpack[Options]``. A docstring's line ``**options: …`` becomes what
    :class:`Options` says of each.
    """
    signature = inspect.signature(function)
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, keyword, default=DEFAULTS.get(name), annotation=kind.__forward_arg__)
        for name, kind in Options.__annotations__.items()
    ]
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    if function.__doc__ and Options.__doc__:  # none with -OO
        said = inspect.cleandoc(Options.__doc__).partition("Attributes:\n")[2]
        lines = inspect.cleandoc(function.__doc__).splitlines()
        where = [place for place, line in enumerate(lines) if line.startswith("    **options:")]
        function.__doc__ = "\n".join(said if place in where else line for place, line in enumerate(lines))
    return function
