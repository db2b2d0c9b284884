"""``cutaway quantize``: a smaller file of a model, and what it costs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cutaway.cli.common import Settings, as_input, find, load_model, progress
from cutaway.cli.options import Text, complete_model, shared
from cutaway.cli.text import Cell, Look, counted, nbytes, table

if TYPE_CHECKING:
    from cutaway.checkpoints.quantised import Losses
    from cutaway.cli.perplexity import Expected
    from cutaway.model import Model


@click.command("quantize")
@click.argument("name", required=False, metavar="[MODEL]", shell_complete=complete_model)
@click.option("-o", "--out", "to", type=Text(), required=True, metavar="OUT", help="OUT.gguf, or a folder.")
@click.option("-t", "--type", "kind", default="q4_k_m", show_default=True, metavar="TYPE", help="See above.")
@click.option("--text", metavar="FILE", help="Measure perplexity on this text. [a page that comes with cutaway]")
@click.option("--perplexity/--no-perplexity", "measured", default=True, help="Read a text before and after. [yes]")
@click.option("--replace", is_flag=True, help="A model that is at OUT already may be replaced.")
@shared("model", "threads", "find", "json", "quiet", "verbose", "debug")
def command(
    settings: Settings,
    /,
    name: str | None,
    to: str,
    kind: str,
    text: str | None,
    measured: bool,
    replace: bool,
) -> None:
    """Write MODEL with its matrices in a smaller TYPE, and say what that costs.

    \b
    q8_0  q6_k  q5_k  q5_1  q5_0  q4_k  q4_1  q4_0    one type for every matrix
    q5_k_m  q5_k_s  q4_k_m  q4_k_s                    llama.cpp's mixes: more bits where they matter most
    f16  bf16  f32                                    plain numbers

    OUT.gguf is one file for llama.cpp too; any other name is a folder in cutaway's own format, which holds any model.
    Matrices whose rows are not whole blocks get the next wider type. Vectors, norms and tables of positions stay as
    they are. MODEL is smollm2 if left out.
    """
    from cutaway.cli import perplexity
    from cutaway.cli.place import check_place, is_gguf
    from cutaway.formats.lock import locked
    from cutaway.formats.mixes import mix_named

    if name is not None:
        settings.model = name
    mix = mix_named(kind, field="--type")
    gguf = is_gguf(to)
    page = perplexity.text_of(text) if measured else ""
    source = find(settings).path
    check_place(source, Path(to), gguf, replace)
    size = _size(source)
    settings.device = "cpu"
    from cutaway.checkpoints.gguf_save import form_of
    from cutaway.checkpoints.quantised import Losses
    from cutaway.store import load, save

    loaded = load_model(settings)
    if gguf:
        form_of(loaded.spec)  # refused before a text is read rather than after
    why = perplexity.why_not(loaded)
    if measured and why is not None:
        settings.note(f"no perplexity: {why}")
    measured = measured and why is None
    _note_twice(settings, loaded)
    before = _read(settings, loaded, page, "before") if measured else None
    losses = Losses()
    with locked(to), progress(settings, f"writing {Path(to).name}") as report:
        save(loaded, to, format="gguf" if gguf else "cutaway", quantize=kind, losses=losses, progress=report)
    del loaded  # two models at once are too many
    after = _read(settings, load(to, device="cpu", offline=True), page, "after") if measured else None
    sizes = size, _size(Path(to))
    if settings.json:
        settings.emit_json(_as_dict(settings.model, to, mix.name, losses, sizes, before, after))
        return
    lines = _lines(settings.look, losses, sizes, before, after)
    settings.emit("\n".join([settings.look.paint(f"{to}  {mix.name}", "bold"), "", *lines]) + "\n")


def _note_twice(settings: Settings, model: Model) -> None:
    """A quantized model's numbers are rounded already."""
    from cutaway.formats.quants import block_type
    from cutaway.kernels import Stored

    weights = model.transformer.state_dict().values()
    kinds = sorted(
        {block_type(weight.blocks()[1]).name for weight in weights if isinstance(weight, Stored)} - {"F16", "BF16"}
    )
    if kinds:
        settings.note(
            f"note: this model is in {', '.join(kinds)} already; errors below are those added to it. "
            "From the original weights the result would be better."
        )


def _read(settings: Settings, model: Model, text: str, when: str) -> Expected:
    from cutaway.cli.perplexity import expected

    label = f"loading: reading the text, {when}"  # as patient as a load: see `progress`
    with as_input(), progress(settings, label) as report:
        return expected(model, text, lambda done, total: report(done, total, label))


def _size(path: Path) -> int:
    """Bytes of a file, or of a folder's weights."""
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.glob("*.safetensors"))


# ---- what is said ------------------------------------------------------------------------------------------


def _drift(before: Expected, after: Expected) -> float:
    """How far a token's log-probability moves, on average."""
    pairs = zip(before.logprobs, after.logprobs, strict=True)
    return sum(abs(a - b) for a, b in pairs) / len(before.logprobs)


def _lines(
    look: Look, losses: Losses, sizes: tuple[int, int], before: Expected | None, after: Expected | None
) -> list[str]:
    head: list[str | Cell] = [
        Cell(word, "dim") for word in ("type", "tensors", "numbers", "size", "mean error", "largest", "relative")
    ]
    rows: list[list[str | Cell]] = [head]
    for name, loss in losses.types.items():
        errors = [f"{loss.mean:.2e}", f"{loss.largest:.2e}", f"{100 * loss.relative:.2f} %"]
        kept = [Cell("as they were", "dim"), "", ""]
        facts = [str(loss.tensors), f"{loss.numbers:,}", nbytes(loss.nbytes)]
        rows.append([Cell(name, "cyan"), *facts, *(errors if loss.measured else kept)])
    lines = table(rows, "lrrrrrr", look)
    others: dict[tuple[str, str, int], int] = {}
    for _, wanted, got, cols in losses.others:
        others[wanted, got, cols] = others.get((wanted, got, cols), 0) + 1
    for (wanted, got, cols), count in others.items():
        what = f"{counted(count, 'tensor')} with rows of {cols:,} numbers, not whole blocks of {wanted}"
        lines.append(look.paint(f"{what}: {got}", "dim"))
    change = f"{sizes[1] / sizes[0]:.2f} x" if look.plain else f"{sizes[1] / sizes[0]:.2f} ×"
    table_of: list[list[str | Cell]] = [
        ["", Cell("before", "dim"), Cell("after", "dim"), ""],
        ["size", nbytes(sizes[0]), nbytes(sizes[1]), Cell(change, "cyan")],
    ]
    if before is None or after is None:
        return [*lines, "", *table(table_of, "lrrr", look)]
    change = f"{100 * (after.perplexity / before.perplexity - 1):+.2f} %"
    table_of.append(["perplexity", f"{before.perplexity:.3f}", f"{after.perplexity:.3f}", Cell(change, "cyan")])
    drift = (
        f"over {counted(len(before.logprobs), 'token')}, whose log-probabilities move by {_drift(before, after):.4f}"
    )
    return [*lines, "", *table(table_of, "lrrr", look), look.paint(f"{drift} on average", "dim")]


def _as_dict(
    model: str,
    out: str,
    kind: str,
    losses: Losses,
    sizes: tuple[int, int],
    before: Expected | None,
    after: Expected | None,
) -> dict[str, Any]:
    types = {
        name: {
            **{key: value for key, value in asdict(loss).items() if key in ("tensors", "numbers", "nbytes")},
            "measured": loss.measured,
            "mean_error": loss.mean,
            "largest_error": loss.largest,
            "relative_error": loss.relative,
        }
        for name, loss in losses.types.items()
    }
    fallbacks = [
        {"tensor": name, "wanted": wanted, "type": got, "columns": cols} for name, wanted, got, cols in losses.others
    ]
    value: dict[str, Any] = {"model": model, "out": out, "type": kind, "types": types, "fallbacks": fallbacks}
    value["bytes"] = {"before": sizes[0], "after": sizes[1]}
    if before is not None and after is not None:
        value["perplexity"] = {
            "tokens": len(before.logprobs),
            "before": before.perplexity,
            "after": after.perplexity,
            "moved": _drift(before, after),
        }
    return value
