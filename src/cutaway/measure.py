"""How fast a model runs here, beside what the machine could do in the same minutes.

A token needs every weight once, and the keys and values of what was read: no machine writes faster than it reads
memory. So reads of a large buffer take turns with the model, and a speed comes with its share of that limit.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from cutaway.errors import RequestError
from cutaway.generation.checks import whole
from cutaway.kernels import Stored
from cutaway.model import Model
from cutaway.models import Transformer
from cutaway.modules.moe import Moe
from cutaway.spec import HeadSpec, ModelSpec

SHORT = 16  # tokens of a prompt that is only to be gone on with, and of a short text
BUFFER = 1 << 29  # bytes, far more than a processor's own memory holds


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Attributes:
        name: what was measured.
        unit: of the values.
        values: round by round.
        shares: of what memory allows, round by round; empty where memory is not what bounds it.
    """

    name: str
    unit: str
    values: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.values)


def measured(
    model: Model, prompt_len: int = 512, gen: int = 64, batch: int = 8, rounds: int = 5, buffer: int = BUFFER
) -> tuple[list[Figure], int | None]:
    """Everything in turns, round by round; a round before the first warms up and does not count.

    The first figure is the machine's own: how fast it reads memory. Of a model that writes come ``prefill``,
    ``decode`` and ``batch``, all greedy; of one that only reads, short and long texts.

    Args:
        model: what to measure; it needs no tokenizer.
        prompt_len: tokens of a long prompt or text; fewer where the model's table of positions ends.
        gen: tokens written in each run, at least two: the first comes with the prompt.
        batch: rows.
        rounds: how many.
        buffer: bytes that are read for the limit.

    Returns:
        The figures; and the most memory that the process had by the end of the warm-up, where the system says.

    Raises:
        RequestError: a number that makes no sense, or a table of positions too short for so many tokens.
    """
    whole("gen", gen, 2, 1 << 20)
    for name, number in (("prompt_len", prompt_len), ("batch", batch), ("rounds", rounds)):
        whole(name, number, 1, 1 << 20)
    own = _writing(model, prompt_len, gen, batch) if model.spec.generates else _reading(model, prompt_len, batch)
    for _, task in own:
        task()
    peak = peak_bytes()  # before the buffer, which is no part of what a model needs
    memory = torch.ones(buffer // 4, device=model.transformer.device)
    _read_speed(memory)
    limit = Figure("memory", "GB/s")
    for _ in range(rounds):
        speed = _read_speed(memory)
        limit.values.append(speed)
        for figure, task in own:
            value, read = task()
            figure.values.append(value)
            if read:
                figure.shares.append(read / 1e9 / speed)
    return [limit, *(figure for figure, _ in own)], peak


# What it came to, and bytes a second that it read, where that is its limit.
_Task = tuple[Figure, Callable[[], tuple[float, float]]]


def _writing(model: Model, prompt: int, tokens: int, rows: int) -> list[_Task]:
    spec, dtype = model.spec, model.transformer.dtype
    limits = [n for n in (spec.position_limit, spec.source_limit) if n is not None]
    most = min(limits, default=sys.maxsize) - tokens
    if most < 1:
        what = "the model's table of positions ends before so many tokens"
        raise RequestError(what, field="gen", expected=f"below {tokens + most}", got=tokens)
    prompt, short, weights = min(prompt, most), min(SHORT, most), step_bytes(model.transformer)

    def run(length: int, count: int, batch: int) -> tuple[float, float]:
        """Tokens a second, and bytes a second. Of one token the prompt's speed, else that of what follows it."""
        ids = [_ids(length, spec.vocab_size, row) for row in range(batch)]
        timing = model.generate(ids, max_tokens=count, min_tokens=count, temperature=0, num_beams=1)[0].timing
        if count == 1:
            return length / timing.total_s, 0.0
        steps = (count - 1) / (timing.decode_s or timing.total_s)
        # On the way from the first step's cache to the last one's.
        held = cache_bytes(spec, length + count // 2, dtype.itemsize) if spec.source is None else 0
        return batch * steps, steps * (weights + batch * held)

    return [
        (Figure(f"prefill {prompt}", "tokens/s"), lambda: run(prompt, 1, 1)),
        (Figure(f"decode {tokens}", "tokens/s"), lambda: run(short, tokens, 1)),
        (Figure(f"batch {rows} × {tokens}", "tokens/s"), lambda: run(short, tokens, rows)),
    ]


def _reading(model: Model, prompt: int, rows: int) -> list[_Task]:
    most = model.spec.position_limit or prompt

    def run(length: int, count: int) -> tuple[float, float]:
        ids = [_ids(length, model.spec.vocab_size, row) for row in range(count)]
        began = time.perf_counter()
        model.hidden(ids)
        _wait(model)
        return count / (time.perf_counter() - began), 0.0

    def task(length: int, count: int) -> _Task:
        return Figure(f"{count} texts of {length}", "texts/s"), lambda: run(length, count)

    lengths = sorted({min(length, most) for length in (SHORT, prompt)})
    # As many tokens of each length, so that neither takes much longer.
    counts = [max(1, rows * lengths[-1] // length) for length in lengths]
    return [task(length, count) for length, count in zip(lengths, counts, strict=True)]


def step_bytes(model: Transformer) -> int:
    """Bytes of weights that are read for one more token: all of the decoder and the head, of experts those chosen."""
    parts: list[nn.Module] = [model.decoder, *([] if model.head is None else [model.head])]
    total = 0
    for module in (module for part in parts for module in part.modules()):
        for parameter in module.parameters(recurse=False):
            size = _size(parameter)
            if isinstance(module, Moe) and parameter.dim() == 3:
                size = size * module.spec.top_k // module.spec.n_experts
            total += size
    tied = isinstance(model.spec.head, HeadSpec) and model.spec.head.tied
    return total + (_size(model.embed.table) if tied else 0)


def cache_bytes(spec: ModelSpec, length: int, itemsize: int) -> int:
    """Bytes of keys and values that a decoder's next token reads after so many; a window ends what is read."""
    total = 0
    for layer in spec.decoder.layers:
        a = layer.attention
        total += 2 * a.n_kv_heads * a.d_head * itemsize * min(length, a.mask.window or length)
    return total


def weight_bytes(model: Transformer) -> int:
    """Of all parameters, as they are held."""
    return sum(map(_size, model.parameters()))


def peak_bytes() -> int | None:
    """The most memory that this process has had, or None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _size(tensor: torch.Tensor) -> int:
    return tensor.raw.numel() if isinstance(tensor, Stored) else tensor.nbytes


def _read_speed(memory: torch.Tensor) -> float:
    """GB/s, the best of three: what the machine can do, not what its other users leave."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        memory.amax().item()
        times.append(time.perf_counter() - began)
    return memory.nbytes / min(times) / 1e9


def _ids(length: int, vocab_size: int, row: int) -> Sequence[int]:
    return [(7 * i + row) % vocab_size for i in range(length)]


def _wait(model: Model) -> None:
    if model.transformer.device.type == "cuda":
        torch.cuda.synchronize()
