"""``cutaway run``: complete a text, as it comes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from cutaway.cli.choosing import check_together, choosing, given, most_tokens, note_idle, searching, settled
from cutaway.cli.common import Settings, as_input, load_model, text_argument
from cutaway.cli.forms import forming, read_forms
from cutaway.cli.guessing import check_draft, guessing, load_draft
from cutaway.cli.kinds import check_able
from cutaway.cli.options import COUNT, kv_dtype, shared
from cutaway.cli.prompts import answer_file, check_many, many
from cutaway.cli.sampling import as_dict, generate, logprob_lines, note_end, stats_line, stream, times
from cutaway.cli.text import counted, safe
from cutaway.errors import RequestError
from cutaway.formats.strict_json import to_json

if TYPE_CHECKING:
    from cutaway.generation.generate import Generation, TokenLogprob
    from cutaway.model import Model, Prompt


@click.command("run")
@click.argument("prompt", required=False)
@click.option(
    "-n", "--max-tokens", type=COUNT, metavar="N", help="Most tokens to write. [the checkpoint's own, or else 256]"
)
@choosing
@searching
@forming
@guessing
@kv_dtype
@click.option("--logprobs", type=COUNT, metavar="K", help="Log-probabilities of the chosen and the K best tokens.")
@click.option(
    "--processed-logprobs",
    type=COUNT,
    metavar="K",
    help="The same of what a token is chosen from: after penalties, form, temperature and the like.",
)
@click.option("--echo", is_flag=True, help="Print the prompt first, with --logprobs its tokens' too.")
@many
@click.option("--stats", is_flag=True, help="Tokens a second, and the time to the first.")
@click.option("--special", is_flag=True, help="Control tokens typed in the prompt count as such, not as text.")
@shared("model", "load", "seed", "lines")
def command(
    settings: Settings,
    /,
    prompt: str | None,
    echo: bool,
    stats: bool,
    special: bool,
    prompts: str | None,
    batch: int | None,
    restart: bool,
    **options: Any,
) -> None:
    """Complete PROMPT, printing the text as it comes; an encoder-decoder answers it (translates, sums up) instead.

    Without PROMPT, or with -, the prompt is read from standard input; one line end at its end is left out. To talk
    with a model, use `cutaway chat`.
    """
    check_together(options)
    check_draft(options)
    options = read_forms(options)
    check_many(settings, prompts, batch, restart, PROMPT=prompt, **{"--echo": echo, "--special": special})
    missing = "No prompt. Give one, pipe one in, or talk with `cutaway chat`."
    text = text_argument(prompt, missing=missing) if prompts is None else ""
    start = time.perf_counter()
    model = load_model(settings)
    options = load_draft(settings, options, model)
    load_s = time.perf_counter() - start
    check_able(settings, model, "run")
    if echo and model.spec.source is not None:
        what, hint = "the answer of an encoder-decoder does not go on from the prompt", "leave --echo out"
        raise RequestError(what, field="--echo", hint=hint)
    arguments = given({"seed": settings.seed, **options}.items())
    if prompts is not None:
        note_idle(settings, model, arguments)
        return answer_file(settings, model, prompts, batch, restart, arguments, stats, load_s)
    ids = _ids(model, text, special)
    note_idle(settings, model, arguments)
    if echo and "logprobs" in arguments:
        arguments["prompt_logprobs"] = arguments["logprobs"]
    sampling = settled(model, arguments)

    before = text if echo else ""
    if sampling.num_beams > 1 or sampling.n > 1:
        beams, n = sampling.num_beams, sampling.n
        says = f"searching with {beams} beams" if beams > 1 else f"writing {n} answers"
        results = generate(model, ids, arguments, settings, says)
        _print_whole(settings, results, before)
    else:
        results = [_stream(settings, model, ids, arguments, before)]
    if settings.json or settings.jsonl:
        value = as_dict(model, results, arguments, load_s, settings)
        for answer in (value, *value.get("choices", ())):
            answer["text"] = before + answer["text"]
        settings.emit(to_json(value, indent=2 if settings.json else None) + "\n")
    if stats:
        print(stats_line(times(load_s, results), *results), file=sys.stderr)
    _report(settings, model, ids, results, most_tokens(model, sampling))


def _ids(model: Model, text: str, special: bool) -> list[int]:
    with as_input():
        if special and model.tokenizer is not None and text:
            return model.tokenizer.encode(text, special=True)
        return model.encode_prompt(text)


def _stream(settings: Settings, model: Model, ids: Prompt, arguments: dict[str, Any], before: str) -> Generation:
    """One answer, printed as it comes."""
    streamed = not (settings.json or settings.to_file)
    pieces = [before]
    show = _printer(settings) if streamed else pieces.append
    if streamed and before and not settings.jsonl:
        show(before)
    try:
        result = stream(model, ids, arguments, show)
    except KeyboardInterrupt:
        if streamed and sys.stdout.isatty():
            print()  # the shell's prompt belongs on a line of its own
        raise
    if not (settings.json or settings.jsonl):
        print(flush=True) if streamed else settings.emit("".join(pieces) + "\n")
    return result


def _print_whole(settings: Settings, results: list[Generation], before: str) -> None:
    """Answers that came at once: one alone as it is, several under their numbers and scores."""
    if settings.json:
        return
    if settings.jsonl:
        pieces = [{"choice": r.choice, "piece": r.text} if len(results) > 1 else {"piece": r.text} for r in results]
        if not settings.to_file:
            settings.emit("".join(to_json(piece) + "\n" for piece in pieces))
        return
    look = settings.look
    out = []
    for result in results:
        text = before + result.text
        out.append((safe(text) if sys.stdout.isatty() and not settings.to_file else text) + "\n")
        if len(results) > 1:
            score = "" if result.score is None else f"  score {result.score:.4f}"
            out[-1] = look.paint(f"[{result.choice + 1}]{score}", "dim") + "\n" + out[-1]
    settings.emit("\n".join(out))


def _printer(settings: Settings) -> Any:
    """Prints a piece at once: as it is, defused on a terminal, or as a JSON object a line."""
    defuse = sys.stdout.isatty()

    def show(piece: str) -> None:
        line = to_json({"piece": piece}) + "\n" if settings.jsonl else safe(piece) if defuse else piece
        sys.stdout.write(line)
        sys.stdout.flush()

    return show


def _report(settings: Settings, model: Model, ids: list[int], results: list[Generation], max_tokens: int) -> None:
    """What belongs beside the text, on standard error."""
    cut = [result for result in results if result.finish_reason == "length"]
    note_end(settings, model, (cut or results)[0], max_tokens)
    if settings.json or settings.jsonl:
        return
    if (read := results[0].prompt_logprobs) is not None:
        _print_logprobs(settings, model, list(zip(ids, read, strict=True)))
    for result in results:
        tables = [("", result.logprobs), ("processed", result.processed_logprobs)]
        if len(results) > 1 and any(found is not None for _, found in tables):
            print(f"[{result.choice + 1}] {counted(len(result.tokens), 'token')}", file=sys.stderr)
        for name, found in tables:
            if found and name and result.logprobs is not None:
                print(f"{name}:", file=sys.stderr)  # the second table of an answer
            if found:
                _print_logprobs(settings, model, [(entry.token, entry) for entry in found])


def _print_logprobs(settings: Settings, model: Model, entries: list[tuple[int, TokenLogprob | None]]) -> None:
    print("\n".join(logprob_lines(model, entries, settings.look)), file=sys.stderr)
