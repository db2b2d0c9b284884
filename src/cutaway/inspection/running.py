"""Running texts and keeping named quantities of them, in a plain pass or through every step of an answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids, flag, whole
from cutaway.generation.generate import Run
from cutaway.generation.inputs import rows_of
from cutaway.generation.options import Options
from cutaway.generation.reading import check_length
from cutaway.generation.sampling import Sampling
from cutaway.generation.unmixed import unmixed
from cutaway.generation.voice import Prompt, Voice
from cutaway.inspection.change import Changed, Edit
from cutaway.inspection.joined import joined
from cutaway.inspection.listed import listed, names_listed
from cutaway.inspection.record import Enough, Recorder
from cutaway.inspection.slopes import check_slopes
from cutaway.inspection.trace import Trace
from cutaway.inspection.traced_file import Facts, Pieces
from cutaway.models import Transformer
from cutaway.models.batch import pad
from cutaway.models.head import Head
from cutaway.models.transformer import Start
from cutaway.spec.names import tap_names
from cutaway.tokenizers.tokenizer import Tokenizer

# Options of generating that a trace takes: how a token is chosen, and where keys and values are kept.
CHOOSING = (
    *("temperature", "top_k", "top_p", "min_p", "temperature_last", "seed"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("bad_words", "no_repeat_ngram_size", "min_tokens"),
    *("schema", "regex", "grammar", "choices", "kv_dtype"),
)
Starts: TypeAlias = dict[str, Start | None]  # stack → where it begins, if not at its beginning


def trace(
    model: Transformer,
    ids: Sequence[Sequence[int]],
    names: Sequence[str],
    edits: Mapping[str, Edit] | None = None,
    max_tokens: int = 0,
    stop_ids: Collection[int] = (),
    sources: Sequence[Sequence[int]] | None = None,
    sampling: Sampling | None = None,
    *,
    start: tuple[str, Tensor] | None = None,
    stop: bool = False,
    grad: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Trace:
    """Run texts and keep the quantities that ``names`` match, in the model's own type: ``torch.autocast`` is off here.

    Args:
        model: what to run.
        ids: token ids of each text. [batch][query]
        names: names or patterns; see ``cutaway show --taps``.
        edits: name or pattern → a function of a copy of the tensor to the one used instead, or one of
            ``cutaway.inspection.edits``. Where several match, all are applied, in their order here.
        max_tokens: how many tokens to go on with, with a cache. Each row's last is read too.
        stop_ids: tokens that end a text.
        sources: of an encoder–decoder, what its encoder reads for each row; ``ids`` are the decoder's.
        sampling: how the next token is chosen, and what ends a text; by default the likeliest, and ``stop_ids``.
        start: the name of a layer's ``resid_in`` and the stream to begin there with, [batch, query, d_model]: what
            comes before is not run.
        stop: end when all that ``names`` match was seen: what comes after is not run.
        grad: keep the graph, for ``torch.autograd.grad`` of one thing that is kept by another, whether weights learn,
            are frozen or stored in blocks. Past the end of a row there is then what was computed there, and no NaN.
        tokenizer: tells a text for each token.

    Raises:
        NameNotFound: a pattern matches nothing; the hint has the nearest names.
        ContextExceeded: more tokens, with those to come, than a learned table has positions.
        RequestError: something makes no sense, by name; an edit that gives back another shape or kind of numbers, or
            that takes hold of nothing.
    """
    rows = [check_ids(row, model.spec.vocab_size, "prompt") for row in listed("prompt", ids, "lists of token ids")]
    if not rows:
        raise RequestError("there are no texts", field="prompt", expected="at least one")
    longest = max(map(len, rows))
    check_length(model, longest + whole("max_tokens", max_tokens, 0), "prompt")
    read = None if sources is None else _sources(model, sources, len(rows))
    if flag("grad", grad):
        check_slopes(model, "grad")
    kept = names_listed("names", names)
    asked = Recorder.of(model.spec, *kept, edits=_edits(edits), stop=flag("stop", stop), leaves=grad)
    if stop and not asked.kept:
        raise RequestError("stops after what is wanted, and nothing is", field="names", expected="a name")
    if max_tokens:
        chosen = sampling or Sampling(temperature=0.0, stop_ids=frozenset(stop_ids))
        _check_run(model, chosen, max_tokens, {"start": start is not None, "stop": stop, "grad": grad})
        run = Run(model, tokenizer, rows, replace(chosen, max_tokens=max_tokens), read, tap=asked)
        for _ in run:
            pass
        rows = [[*row.prompt, *row.tokens] for row in run.rows]
    else:
        begin = {} if start is None else _start(model, start, rows, read)
        with torch.set_grad_enabled(grad), unmixed(model.device), suppress(Enough):
            _pass(model, rows, read, asked, begin)
    asked.check()
    facts = Facts(
        model.spec, tap_names(model.spec), rows, _pieces(tokenizer, rows, True), read, _pieces(tokenizer, read)
    )
    return Trace({name: _whole(asked, name, facts, grad) for name in facts.axes if name in asked.kept}, facts)


def _pass(
    model: Transformer, rows: list[list[int]], sources: list[list[int]] | None, tap: Recorder, start: Starts
) -> None:
    """Whole texts at once, without a cache, as far as anybody wants to know."""
    source = None
    if sources is not None:
        source = model.read(*pad(sources), tap=tap, start=start.get("encoder"))
    ids, positions = pad(rows)
    hidden = model.hidden(ids, positions, tap=tap, source=source, start=start.get(model.spec.main))
    # Logits of every place only for whom asks: with a large vocabulary they are by far the largest tensor.
    if not tap.wants("logits") and tap.at("head") is None:
        return
    if isinstance(model.head, Head):
        model.unembed(hidden, tap)
    else:
        model.answer(hidden, positions, tap)


def _whole(asked: Recorder, name: str, facts: Facts, grad: bool) -> Tensor:
    """A quantity of all passes."""
    passes = asked.kept.pop(name)  # so that what is joined and what it is made of are there together for one name only
    if not passes:
        raise RequestError("was not computed", field=name, hint="It comes before the start.")
    if grad:
        return passes[0]
    axes, lengths = facts.axes[name], [len(row) for row in facts.tokens]
    read = lengths if facts.sources is None else [len(row) for row in facts.sources]
    computed = lengths if "query" in axes else read
    return joined(name, axes, passes, asked.positions[name], computed, lengths if "key" in axes else read)


def _sources(model: Transformer, sources: Sequence[Sequence[int]], rows: int) -> list[list[int]]:
    if model.spec.source is None:
        raise RequestError("this model reads one text, not a source and a target", field="sources", got=len(sources))
    size = model.spec.source_vocab_size or model.spec.vocab_size
    read = [check_ids(row, size, "sources") for row in sources]
    if len(read) != rows:
        raise RequestError("not a source for each row", field="sources", expected=rows, got=len(read))
    check_length(model, max(map(len, read)), "prompt", of_source=True)
    return read


def _start(model: Transformer, start: object, rows: list[list[int]], sources: list[list[int]] | None) -> Starts:
    """Which stack begins where, and with what.

    Raises:
        RequestError: no such place, or no such stream.
    """
    wanted = ("the name of a layer's resid_in", "a tensor")
    if not isinstance(start, tuple) or len(start) != 2 or not isinstance(start[1], Tensor):
        raise RequestError("not a place to start", field="start", expected=wanted, got=type(start).__name__)
    name, stream = start
    parts = name.split(".") if isinstance(name, str) and name in tap_names(model.spec) else []
    if len(parts) != 4 or parts[3] != "resid_in":
        raise RequestError("not a place to start", field="start", expected=wanted[0], got=name)
    texts = sources if sources is not None and parts[0] == "encoder" else rows
    positions = pad(texts)[1].to(model.device)
    shape = [len(texts), positions.shape[1], model.spec.d_model]
    if [*stream.shape] != shape:
        raise RequestError("not a stream of these texts", field="start", expected=shape, got=[*stream.shape])
    # What a trace has past the end of a row is NaN, which a weight of 0 does not hide.
    stream = torch.where((positions >= 0)[..., None], stream.to(model.device, model.dtype), 0.0)
    return {parts[0]: (int(parts[2]), stream)}


def traced(
    voice: Voice,
    prompt: Prompt | Sequence[Prompt],
    names: Sequence[str],
    edits: Mapping[str, Edit] | None = None,
    max_tokens: int = 0,
    target: Any = None,
    *,
    start: tuple[str, Tensor] | None = None,
    stop: bool = False,
    grad: bool = False,
    **options: Any,
) -> Trace:
    """:func:`trace` of what people say: see ``Model.trace``."""
    model, ids, sampling = voice.model, voice.all_ids(prompt), watched(voice, options)
    rows, sources = ids, None
    if model.spec.source is not None:
        rows = [voice.start()] * len(ids) if target is None else rows_of(target, "target", model.spec.vocab_size)
        sources = ids
    elif target is not None:
        raise RequestError("this model reads one text, not a source and a target", field="target", got=target)
    kept: Any = {"start": start, "stop": stop, "grad": grad, "tokenizer": voice.tokenizer}
    return trace(model, rows, names, edits, max_tokens, sources=sources, sampling=sampling, **kept)


def watched(voice: Voice, options: Mapping[str, Any]) -> Sampling:
    """How the tokens of a trace are chosen: greedily, unless a call's options say otherwise.

    Raises:
        RequestError: there is no such option, or not here.
    """
    for name in options:
        if name in Options.__annotations__ and name not in CHOOSING:
            hint = "generate takes it."
            raise RequestError("is no option of a trace", field=name, expected=", ".join(CHOOSING), hint=hint)
    return voice.sampling(**{"temperature": 0, "num_beams": 1, **options})


def _check_run(model: Transformer, sampling: Sampling, max_tokens: int, once: Mapping[str, bool]) -> None:
    """Refuse what does not go with generating.

    Raises:
        RequestError: by name.
    """
    if not model.spec.generates:
        what = "this model does not say what comes next"
        raise RequestError(what, field="max_tokens", expected=0, got=max_tokens)
    for name, given in once.items():
        if given:
            what = "only a text that is read once, in one pass"
            raise RequestError(what, field=name, expected="max_tokens=0", got=f"max_tokens={max_tokens}")
    if sampling.num_beams > 1 or sampling.n > 1:
        raise RequestError("a row is one answer", field="num_beams" if sampling.num_beams > 1 else "n", expected=1)
    if sampling.deterministic:
        what = "what is watched is computed by the readable blocks, whose sums have no fixed order"
        raise RequestError(what, field="deterministic", expected=False, got=True)


def _pieces(tokenizer: Tokenizer | None, rows: list[list[int]] | None, written: bool = False) -> Pieces | None:
    """A text for each token."""
    if tokenizer is None or rows is None:
        return None
    words = tokenizer.target if written else tokenizer
    return [[piece.text for piece in words.pieces(row)] for row in rows]


def _edits(edits: Any) -> Mapping[str, Edit]:
    """Edits, if they are such."""
    if edits is None:
        return {}
    if not isinstance(edits, Mapping):
        raise RequestError("not a mapping", field="edits", expected="name → function of a tensor", got=edits)
    for name, edit in edits.items():
        if not isinstance(name, str):
            raise RequestError("not a name", field="edits", expected="a text", got=name)
        if not callable(edit) and not isinstance(edit, Changed):
            raise RequestError("not a function", field=f"edits/{name}", expected="a function of a tensor", got=edit)
    return edits
