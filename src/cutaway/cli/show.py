"""``cutaway show``: what a model is made of, or one of its tensors. No weights are loaded but the one asked for."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cutaway.cli.common import Settings, find
from cutaway.cli.options import COUNT, complete_model, shared
from cutaway.cli.text import Cell, Look, counted, loose, table, visible
from cutaway.errors import NameNotFound, RequestError, TemplateError
from cutaway.formats.strict_json import to_json

if TYPE_CHECKING:
    from cutaway.cli.anatomy import Source

_MOST_VALUES = 16  # of a list in a GGUF's key/values


@click.command("show")
@click.argument("names", nargs=-1, metavar="[MODEL] [TENSOR]", shell_complete=complete_model)
@click.option("--taps", "what", flag_value="taps", help="Every quantity that can be read or edited, and what it is.")
@click.option("--config", "what", flag_value="config", help="The config, or a GGUF's key/values.")
@click.option("--template", "what", flag_value="template", help="The chat template.")
@click.option("--tokenizer", "what", flag_value="tokenizer", help="The tokenizer: its kind, size and control tokens.")
@click.option("--depth", type=COUNT, metavar="N", help="Levels of the tree: 1 parts, 2 layers, 3 branches, 4 tensors.")
@click.option(
    "--filter", "pattern", metavar="PATTERN", help="Only names that hold this, or end in it where it has * or ?."
)
@shared("model", "find", "lines")
@click.pass_context
def command(
    ctx: click.Context,
    settings: Settings,
    /,
    names: tuple[str, ...],
    what: str | None,
    depth: int | None,
    pattern: str | None,
) -> None:
    """Show what MODEL is made of, or the numbers of its TENSOR.

    MODEL is smollm2 if left out; -m MODEL says the same. TENSOR is a name of the tree (decoder.layers.3.attn.q) or of
    the file. -v shows every layer, and the file's own names. FILE.cut, a trace, is shown too.
    """
    words = list(names)
    if words and ctx.get_parameter_source("model") is ParameterSource.DEFAULT:
        settings.model = words.pop(0)
    tensor = words.pop(0) if words else None
    if words:
        raise click.UsageError(f"Got unexpected extra argument ({' '.join(words)})", ctx)
    if tensor is not None and (what or pattern or depth is not None):
        raise click.UsageError("TENSOR stands alone.", ctx)
    if settings.model.endswith(".cut"):
        if tensor is not None or what or pattern or depth is not None:
            raise click.UsageError("A trace stands alone.", ctx)
        from cutaway.cli.trace import show

        show(settings, settings.model)
        return
    resolved = find(settings)
    from cutaway.cli.anatomy import open_source

    with open_source(resolved) as source:
        if tensor is not None:
            _tensor(settings, source, tensor)
        elif what == "taps":
            _taps(settings, source, pattern)
        elif what == "config":
            _config(settings, source)
        elif what == "template":
            _template(settings, source)
        elif what == "tokenizer":
            _tokenizer(settings, source)
        else:
            _model(settings, source, depth, pattern)


def _model(settings: Settings, source: Source, depth: int | None, pattern: str | None) -> None:
    from cutaway.cli import facts, tree

    if pattern is not None:
        matched = _matching(source, pattern)
        source.parts = [part for part in source.parts if part in matched]
    if settings.jsonl:
        settings.emit_json(facts.as_dict(source)["tensors"])
        return
    if settings.json:
        types = {
            kind: dict(zip(("tensors", "parameters", "bytes"), row, strict=True))
            for kind, row in tree.by_type(source.parts).items()
        }
        settings.emit_json(facts.as_dict(source) | {"types": types})
        return
    look = settings.look
    if pattern is not None:
        settings.emit("\n".join(tree.draw_list(source.parts, look, stored=bool(settings.verbose))) + "\n")
        return
    root = tree.build(source, fold=not settings.verbose)
    levels = 99 if depth is None else depth
    lines = [*facts.describe(source, look), "", *tree.draw(root, look, depth=levels, stored=bool(settings.verbose))]
    settings.emit("\n".join([*lines, "", *tree.draw_types(source.parts, look)]) + "\n")
    for word, names in (("not used by the model", source.left), ("missing", source.missing)):
        if names and source.spec is not None:
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            are = "tensor is" if len(names) == 1 else "tensors are"
            settings.note(f"note: {len(names):,} {are} {word}: {shown}")


def _matching(source: Source, pattern: str) -> list[Any]:
    wanted = loose(pattern)
    found = [p for p in source.parts if fnmatchcase(p.name, wanted) or fnmatchcase(p.stored, wanted)]
    if not found:
        raise NameNotFound("no tensor's name matches", field=pattern, hint="`cutaway show MODEL -v` lists them")
    return found


def _tensor(settings: Settings, source: Source, name: str) -> None:
    from cutaway.cli import statistics

    part = source.part(name)
    tensor = source.tensor(part)
    found = statistics.measure(tensor)
    if settings.json or settings.jsonl:
        about = {"name": part.name, "stored": part.stored, "shape": list(part.shape), "type": part.type}
        settings.emit_json(about | {"bytes": part.nbytes} | found.as_dict())
        return
    settings.emit("\n".join(statistics.draw(part, found, settings.look)) + "\n")


def _taps(settings: Settings, source: Source, pattern: str | None) -> None:
    from cutaway.cli import taps

    if source.spec is None:
        raise RequestError(
            "the names are those of a model that cutaway knows", path=source.resolved.path, hint=source.problem
        )
    rows = taps.listed(source.spec, pattern)
    if settings.json or settings.jsonl:
        settings.emit_json(rows if settings.jsonl else {"model": settings.model, "taps": rows})
        return
    settings.emit("\n".join(taps.draw(source.spec, rows, settings.look, every=bool(settings.verbose))) + "\n")


def _config(settings: Settings, source: Source) -> None:
    values = {key: _bounded(value) for key, value in source.config.items()}
    if settings.json or settings.jsonl or source.types is None:
        settings.emit(to_json(values, indent=None if settings.jsonl else 2) + "\n")
        return
    look = settings.look
    rows: list[list[str | Cell]] = []
    for key, value in values.items():
        text = value if isinstance(value, str) else to_json(value)
        rows.append([key, Cell(source.types(key), "dim"), Cell(visible(text, look), "cyan")])
    settings.emit("\n".join(table(rows, "lll", look, gives=2)) + "\n")


def _bounded(value: Any) -> Any:
    """A value of a GGUF fit for JSON; a vocabulary is only counted."""
    import numpy as np

    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list) and len(value) > _MOST_VALUES:
        return f"({len(value):,} values)"
    return value


def _template(settings: Settings, source: Source) -> None:
    tokenizer = source.tokenizer()
    template = None if tokenizer is None else tokenizer.chat_template
    if template is None:
        raise TemplateError(
            "this model has no chat template", path=source.resolved.path, hint="it completes text: `cutaway run`"
        )
    if settings.json or settings.jsonl:
        settings.emit_json({"model": settings.model, "template": template.source})
        return
    settings.emit(template.source if template.source.endswith("\n") else template.source + "\n")


def _tokenizer(settings: Settings, source: Source) -> None:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise RequestError("this model came without a tokenizer", path=source.resolved.path)
    steps = ("normalizer", "pre_tokenizer", "decoder")
    parts = {step: type(part).__name__ for step in steps if (part := getattr(tokenizer.backend, step)) is not None}
    value = {
        "model": settings.model,
        "kind": type(tokenizer.backend.model).__name__,
        **parts,
        "vocab_size": tokenizer.vocab_size,
        "adds_bos": tokenizer.adds_bos,
        "bos": tokenizer.bos_id,
        "eos": list(tokenizer.eos_ids),
        "unk": tokenizer.unk_id,
        "pad": tokenizer.pad_id,
        "chat_template": tokenizer.chat_template is not None,
        "special": dict(sorted(tokenizer.special.items(), key=lambda item: item[1])),
    }
    if settings.json or settings.jsonl:
        settings.emit_json(value)
        return
    settings.emit("\n".join(_tokenizer_lines(value, settings.look)) + "\n")


def _tokenizer_lines(value: dict[str, Any], look: Look) -> list[str]:
    special: dict[str, int] = value.pop("special")
    names = {index: text for text, index in special.items()}

    def said(key: str, item: Any) -> str:
        if key in ("bos", "eos", "unk", "pad") and item is not None:
            ids = item if isinstance(item, list) else [item]
            return ", ".join(f"{i} {visible(names.get(i, ''), look)}".strip() for i in ids) or "none"
        return (
            {None: "none", True: "yes", False: "no"}.get(item, f"{item:,}" if isinstance(item, int) else str(item))
            if not isinstance(item, list)
            else "none"
        )

    rows: list[list[str | Cell]] = [
        [key.replace("_", " "), Cell(said(key, item), "cyan")] for key, item in value.items() if key != "model"
    ]
    tokens: list[list[str | Cell]] = [[str(i), Cell(visible(text, look), "magenta")] for text, i in special.items()]
    return [
        *table(rows, "ll", look, gives=1),
        "",
        counted(len(special), "control token"),
        *table(tokens, "rl", look, gives=1),
    ]
