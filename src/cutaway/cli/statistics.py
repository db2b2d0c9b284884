"""One tensor in numbers and in a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from cutaway.cli.anatomy import Part
from cutaway.cli.text import Look, counted, cut, nbytes

_HEIGHT, _SPREAD = 6, 4.0  # rows of the picture; standard deviations to each side that it shows
_RISING = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Statistics:
    """Facts about numbers. The finite ones alone enter min, max, mean and std; None where there is none.

    Attributes:
        low, high: ends of the histogram.
        below, above: finite numbers outside it.
    """

    count: int
    nan: int
    inf: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    low: float = 0.0
    high: float = 0.0
    below: int = 0
    above: int = 0
    histogram: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def measure(tensor: Tensor, bins: int = 40) -> Statistics:
    """Statistics of a tensor. The histogram leaves out what is further than four standard deviations from the mean."""
    import torch

    x = tensor.flatten().to(torch.float32 if tensor.dtype.itemsize < 8 else torch.float64)
    finite = x[x.isfinite()]
    nan = int(x.isnan().sum())
    counts = x.numel(), nan, x.numel() - len(finite) - nan, int((x == 0).sum())
    if not len(finite):
        return Statistics(*counts, min=None, max=None, mean=None, std=None)
    least, most = float(finite.min()), float(finite.max())
    mean = float(finite.mean(dtype=torch.float64))
    std = float((finite.double() - mean).square().mean().sqrt())
    low, high = max(least, mean - _SPREAD * std), min(most, mean + _SPREAD * std)
    if high <= low:
        return Statistics(*counts, min=least, max=most, mean=mean, std=std, low=least, high=most)
    bars = torch.histc(finite, bins, low, high)
    below, above = int((finite < low).sum()), int((finite > high).sum())
    return Statistics(
        *counts,
        min=least,
        max=most,
        mean=mean,
        std=std,
        low=low,
        high=high,
        below=below,
        above=above,
        histogram=tuple(int(n) for n in bars.tolist()),
    )


def draw(part: Part, found: Statistics, look: Look) -> list[str]:
    """A tensor as lines."""
    cross = " x " if look.plain else " × "
    shape = cross.join(map(str, part.shape)) or "one number"
    facts = [shape, part.type, counted(found.count, "number"), nbytes(part.nbytes)]
    lines = [look.paint(part.name, "bold"), cut(f" {look.dot} ".join(facts), look.width, look)]
    if part.stored != part.name:
        lines.append(look.paint(cut(f"in the file: {part.stored}", look.width, look), "dim"))
    lines.append("")
    numbers = [(w, v) for w in ("min", "max", "mean", "std") if (v := getattr(found, w)) is not None]
    lines += _spread([f"{word} {value:.4g}" for word, value in numbers], look)
    odd = [f"{word} {getattr(found, key):,}" for word, key in (("zeros", "zeros"), ("NaN", "nan"), ("infinite", "inf"))]
    bad = bool(found.nan or found.inf)
    lines += [look.paint(line, "bold red" if bad else "") for line in _spread(odd, look)]
    return lines if not found.histogram else [*lines, "", *_picture(found, look)]


def _spread(facts: list[str], look: Look) -> list[str]:
    line = "   ".join(fact.ljust(14) for fact in facts).rstrip()
    return [line] if len(line) <= look.width else facts


def _picture(found: Statistics, look: Look) -> list[str]:
    """The histogram, standing."""
    wide = max(1, min(2, (look.width - 2) // len(found.histogram)))
    most = max(found.histogram)
    lines = []
    for row in range(_HEIGHT - 1, -1, -1):
        filled = [min(max(n / most * _HEIGHT - row, 0.0), 1.0) for n in found.histogram]
        if look.plain:
            letters = ["#" if share >= 0.5 else " " for share in filled]
        else:
            letters = [_RISING[round(share * 8)] for share in filled]
        lines.append(look.paint("".join(letter * wide for letter in letters).rstrip(), "cyan"))
    room = wide * len(found.histogram)
    lines.append(("-" if look.plain else "─") * room)
    left, right = f"{found.low:.3g}", f"{found.high:.3g}"
    lines.append(left + right.rjust(room - len(left)))
    if found.below or found.above:
        lines.append(look.paint(f"not shown: {found.below:,} further left, {found.above:,} further right", "dim"))
    return lines
