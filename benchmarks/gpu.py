"""A model of random weights on a CUDA device: bf16 beside fp32, then decode, prefill and batch beside the limits.

benchmarks/gpu.sh [--seconds 300] [--out FOLDER]      python -m benchmarks.gpu --device cpu --tiny: to see that it works

Nothing new begins after so many seconds, and what was measured by then is kept, line by line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cutaway.cache import StoredCache
from cutaway.models import Transformer
from cutaway.models.graphed import GraphedDecoder
from cutaway.spec.recipe import expand

COMMON = {
    "norm": "rms",
    "activation": "silu",
    "gated": True,
    "qk_norm": "head",
    "positions": "rotary",
    "vocab_size": 151_936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6 B": {"d_model": 1024, "n_heads": 16, "n_kv_heads": 8, "d_head": 128, "d_ff": 3072, "layers": 28, "tied": True},
    "8 B": {"d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "d_head": 128, "d_ff": 12288, "layers": 36, "tied": False},
}
TINY = {"tiny": {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128, "layers": 2, "vocab_size": 512}}
CONTEXT, STEPS, ROUNDS = 128, 32, 5


def drawn(words: dict[str, Any], device: str, dtype: torch.dtype) -> Transformer:
    """A model whose weights are drawn where they are to be: numbers of about the size that a trained one has."""
    with torch.device("meta"):
        model = Transformer(expand({**COMMON, **words}))
    model = model.to(dtype).to_empty(device=device).eval()
    source = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=source)
    return model


@torch.no_grad()
def fed(model: Transformer, cache: StoredCache, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """What a session does, of which only torch is needed: logits after equally many more tokens in each row."""
    return model.unembed(model.hidden(torch.tensor(rows), cache=cache)[:, -1:])[:, 0]


class Bench:
    """Lines of the table, until time is up."""

    def __init__(self, device: str, seconds: float, out: Path) -> None:
        self.device, self.out, self.ends = device, out, time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []

    def seconds(self, call: Callable[[], object], each: int = 1) -> list[float]:
        """Of each of some rounds, after one that warms up; ``each`` calls make a round."""
        times = []
        for turn in range(ROUNDS + 1):
            self.wait()
            began = time.perf_counter()
            for _ in range(each):
                call()
            self.wait()
            times += [(time.perf_counter() - began) / each] * bool(turn)
        return times

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def line(self, shape: str, what: str, unit: str, values: list[float], of: str = "", share: float = 0.0) -> None:
        """Keep one, and write the page again: a machine may be gone at any moment."""
        median = statistics.median(values)
        row = {"shape": shape, "what": what, "unit": unit, "values": values, "of": of, "share": share}
        self.rows.append(row)
        print(
            f"{shape:6} {what:44} {median:12,.1f} {unit:9} {f'{100 * share:.0f} % of {of}' if of else ''}", flush=True
        )
        self.write()

    def over(self, what: str) -> bool:
        """Whether there is no time for it; then it is noted."""
        if time.monotonic() < self.ends:
            return False
        self.left_out.append(what)
        return True

    def write(self) -> None:
        """gpu.json and gpu.md."""
        self.out.mkdir(parents=True, exist_ok=True)
        name = torch.cuda.get_device_name() if self.device == "cuda" else "a processor"
        said = (
            f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; random weights, bf16; medians of {ROUNDS}"
        )
        lines = [said + ".", "", "| model | what | | least to most | share |", "| --- | --- | --- | --- | --- |"]
        for row in self.rows:
            values = row["values"]
            share = f"{100 * row['share']:.0f} % of {row['of']}" if row["of"] else ""
            spread = f"{min(values):,.3f} to {max(values):,.3f}"
            middle = f"{statistics.median(values):,.3f} {row['unit']}"
            lines.append(f"| {row['shape']} | {row['what']} | {middle} | {spread} | {share} |")
        if self.left_out:
            lines += ["", "No time was left for " + ", ".join(self.left_out) + "."]
        (self.out / "gpu.md").write_text("\n".join(lines) + "\n")
        (self.out / "gpu.json").write_text(json.dumps({"about": said, "rows": self.rows, "left_out": self.left_out}))


def limits(bench: Bench) -> tuple[float, float]:
    """Bytes a second of copies (read and written), operations a second of a bf16 product."""
    size = 1 << (32 if bench.device == "cuda" else 24)
    one = torch.ones(size // 4, device=bench.device)
    two = torch.empty_like(one)
    copies = [2 * one.nbytes / t for t in bench.seconds(lambda: two.copy_(one))]
    n = 8192 if bench.device == "cuda" else 256
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)
    products = [2 * n**3 / t for t in bench.seconds(lambda: a @ a, 10)]
    bench.line("", "copies", "GB/s", [x / 1e9 for x in copies])
    bench.line("", "bf16 products", "TFLOP/s", [x / 1e12 for x in products])
    return statistics.median(copies), statistics.median(products)


def exact(bench: Bench, shape: str, words: dict[str, Any]) -> None:
    """Logits of bf16 beside those of the same weights in fp32; and a graph's tokens beside plain ones'."""
    low = drawn(words, bench.device, torch.bfloat16)
    high = drawn(words, bench.device, torch.float32)
    high.load_state_dict(low.state_dict())
    ids = torch.randint(low.spec.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, two = low(ids).float(), high(ids)
    apart = float((one - two).abs().max() / two.std())
    usual = float((one - two).square().mean().sqrt() / two.std())
    same = float((one.argmax(-1) == two.argmax(-1)).float().mean())
    bench.line(shape, "bf16 beside fp32: furthest logit, in spreads", "", [apart])
    bench.line(shape, "bf16 beside fp32: the same likeliest token", "%", [100 * same])
    bench.line(shape, "bf16 beside fp32: root mean square, in spreads", "", [usual])
    if not usual < 0.1:  # sums in bf16 stay within a few hundredths; a wrong matrix is at 1
        raise SystemExit("bf16 is not right")
    rows, cache, graphed = ids[:, :16].tolist(), high.new_cache(2, 64), GraphedDecoder(high, 2, 64)
    expected, got, worst = fed(high, cache, rows), graphed.read(rows), 0.0
    for token in range(16):
        worst = max(worst, float((expected - got).abs().max() / expected.std()))
        expected, got = fed(high, cache, [[token]] * 2), graphed.step(torch.tensor([token] * 2, device=bench.device))
    bench.line(shape, "a graph beside plain steps, fp32: furthest logit, in spreads", "", [worst])
    if not worst < 0.01:
        raise SystemExit("a graph's steps are not right")


def speed(bench: Bench, shape: str, words: dict[str, Any], bandwidth: float, peak: float) -> None:
    """Decode, batch and prefill."""
    model = drawn(words, bench.device, torch.bfloat16)
    table = model.embed.table
    tied = words.get("tied", True)
    weights = sum(p.nbytes for p in model.parameters()) - (0 if tied else table.nbytes)
    a = model.spec.decoder.layers[0].attention
    held = 2 * a.n_kv_heads * a.d_head * 2 * len(model.spec.decoder.layers)  # bytes of a token's keys and values
    matrices = sum(p.numel() for p in model.decoder.parameters() if p.dim() == 2)
    for rows in (1, 8, 64):
        for way in ("plain", "graph"):
            what = f"decode, {rows} at once, {way}"
            if bench.over(f"{shape} {what}"):
                continue
            prompts = [[(7 * i + row) % 500 for i in range(CONTEXT)] for row in range(rows)]
            room = CONTEXT + STEPS * (ROUNDS + 1) + 8
            if way == "graph":
                graphed = GraphedDecoder(model, rows, room)
                chosen = [graphed.read(prompts).argmax(-1)]

                def step(graphed: GraphedDecoder = graphed, chosen: list[torch.Tensor] = chosen) -> None:
                    chosen[0] = graphed.step(chosen[0]).argmax(-1)
            else:
                cache = model.new_cache(rows, room)
                fed(model, cache, prompts)

                def step(cache: StoredCache = cache, rows: int = rows) -> None:
                    fed(model, cache, [[5]] * rows).argmax(-1).cpu()

            times = bench.seconds(step, STEPS)
            read = weights + rows * held * (room if way == "graph" else room - STEPS)
            share = read / bandwidth / statistics.median(times)
            bench.line(shape, what, "tokens/s", [rows / t for t in times], "the copies' speed", share)
    for length in (512, 2048, 8192):
        if bench.over(f"{shape} prefill of {length}"):
            continue
        prompt = [[i % 500 for i in range(length)]]
        times = bench.seconds(lambda prompt=prompt: fed(model, model.new_cache(1, len(prompt[0]) + 8), prompt).cpu())
        operations = 2 * matrices * length + 2 * a.n_heads * a.d_head * length**2 * len(model.spec.decoder.layers)
        share = operations / peak / statistics.median(times)
        bench.line(shape, f"prefill of {length}", "tokens/s", [length / t for t in times], "the products' speed", share)


def main() -> None:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=270)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    words = parser.parse_args()
    if words.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    bench = Bench(words.device, words.seconds, words.out)
    bandwidth, peak = limits(bench)
    shapes = TINY if words.tiny else SHAPES
    first = next(iter(shapes))
    exact(bench, first, shapes[first])
    for shape, given in shapes.items():
        if not bench.over(shape):
            speed(bench, shape, given, bandwidth, peak)
            if words.device == "cuda":
                torch.cuda.empty_cache()
    bench.write()


if __name__ == "__main__":
    main()
