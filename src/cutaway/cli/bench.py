"""``cutaway bench``: how fast a model runs here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from cutaway.cli.common import Settings, load_model
from cutaway.cli.options import COUNT, complete_model, shared
from cutaway.cli.text import Cell, Look, counted, nbytes, table

if TYPE_CHECKING:
    from cutaway.measure import Figure
    from cutaway.model import Model


@click.command("bench")
@click.argument("name", required=False, metavar="[MODEL]", shell_complete=complete_model)
@click.option("--prompt-len", type=COUNT, default=512, metavar="N", help="Tokens of a prompt or long text. [512]")
@click.option("--gen", type=COUNT, default=64, metavar="N", help="Tokens to write. [64]")
@click.option("--batch", type=COUNT, default=8, metavar="N", help="Rows of a batch. [8]")
@click.option("--rounds", type=COUNT, default=5, metavar="N", help="Everything in turns, so many times. [5]")
@shared("model", "load", "output")
def command(settings: Settings, /, name: str | None, prompt_len: int, gen: int, batch: int, rounds: int) -> None:
    """Measure how fast MODEL runs here: reading, writing, a batch, memory and loading.

    Medians of several rounds, with the least and the most. What a model writes is bound by how fast memory can be
    read: that is measured in the same rounds, and the share of it shown. Of an encoder: texts a second. With
    --quantize, the model's perplexity and log-probabilities are compared with those of the model as it is.
    """
    import torch

    from cutaway.measure import measured

    settings.model = name or settings.model
    began = time.perf_counter()
    model = load_model(settings)
    load_s = time.perf_counter() - began
    settings.note(f"measuring: {counted(rounds, 'round')} after one that warms up")
    figures, peak = measured(model, prompt_len, gen, batch, rounds)
    cost = _cost(settings, model) if settings.quantize else None
    facts = _facts(settings, model, rounds, torch.get_num_threads())
    facts |= {"load_s": load_s, "memory": {**_memory(model), "peak": peak}, "cost": cost}
    if settings.json:
        settings.emit_json({**facts, "figures": [_as_dict(figure) for figure in figures]})
    else:
        settings.emit("\n".join(_lines(facts, figures, settings.look)) + "\n")


def _cost(settings: Settings, model: Model) -> dict[str, Any] | None:
    """What rounding does to the page of prose that comes with cutaway: perplexities, and how far a token's moves."""
    from dataclasses import replace

    from cutaway.cli import perplexity

    if (why := perplexity.why_not(model)) is not None:
        settings.note(f"no perplexity: {why}")
        return None
    page = perplexity.text_of(None)
    after, before = (perplexity.expected(m, page) for m in (model, load_model(replace(settings, quantize=None))))
    moved = [abs(a - b) for a, b in zip(before.logprobs, after.logprobs, strict=True)]
    return {
        "tokens": len(moved),
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
        "moved": sum(moved) / len(moved),
    }


def _facts(settings: Settings, model: Model, rounds: int, threads: int) -> dict[str, Any]:
    from cutaway.kernels import missing

    network = model.transformer
    return {
        "model": settings.model,
        "device": str(network.device),
        "dtype": str(network.dtype).removeprefix("torch."),
        "quantize": settings.quantize,
        "threads": threads,
        "kernels": missing() or "native" if network.device.type == "cpu" else "PyTorch's",
        "rounds": rounds,
    }


def _memory(model: Model) -> dict[str, Any]:
    """In bytes."""
    from cutaway.measure import cache_bytes, step_bytes, weight_bytes

    network, writes = model.transformer, bool(model.spec.decoder.layers)
    return {
        "weights": weight_bytes(network),
        "read_for_a_token": step_bytes(network) if writes else None,
        "cache_for_a_token": cache_bytes(model.spec, 1, network.dtype.itemsize) if writes else None,
    }


def _as_dict(figure: Figure) -> dict[str, Any]:
    import statistics

    return {
        "name": figure.name,
        "unit": figure.unit,
        "median": figure.median,
        "least": min(figure.values),
        "most": max(figure.values),
        "values": figure.values,
        "share_of_memory_speed": statistics.median(figure.shares) if figure.shares else None,
    }


def _lines(facts: dict[str, Any], figures: list[Figure], look: Look) -> list[str]:
    dash = "-" if look.plain else "–"
    said = [facts["model"], facts["dtype"], facts["device"], counted(facts["threads"], "thread")]
    head = f" {look.dot} ".join([*said, f"kernels: {facts['kernels']}", counted(facts["rounds"], "round")])
    rows: list[list[str | Cell]] = [[*(Cell(word, "dim") for word in ("", "median", "least", "most", "", ""))]]
    rows.append(["load", f"{facts['load_s']:.2f}", "", "", "s", Cell("once", "dim")])
    for figure in figures:
        one = _as_dict(figure)
        share = one["share_of_memory_speed"]
        note = "" if share is None else f"{100 * share:.0f} % of what reading memory allows"
        values = [_number(one[word]) for word in ("median", "least", "most")]
        rows.append([figure.name if not look.plain else figure.name.replace("×", "x"), *values, figure.unit, note])
    memory = facts["memory"]
    parts = [f"weights {nbytes(memory['weights'])}"]
    if memory["cache_for_a_token"]:
        parts.append(f"cache {nbytes(memory['cache_for_a_token'])} a token")
    if memory["peak"]:
        parts.append(f"the process at most {nbytes(memory['peak'])}")
    lines = [
        look.paint(head, "bold"),
        "",
        *table(rows, "lrrrll", look, gives=5),
        "",
        f"memory {dash} {', '.join(parts)}",
    ]
    if (cost := facts["cost"]) is not None:
        before, after = cost["perplexity_before"], cost["perplexity_after"]
        change = f"perplexity {before:.3f} before, {after:.3f} after ({100 * (after / before - 1):+.2f} %)"
        moved = f"log-probabilities move by {cost['moved']:.4f} nats over {cost['tokens']:,} tokens"
        lines.append(f"{facts['quantize']} {dash} {change}; {moved}")
    return lines


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
