"""Training a tuned lens: a regression of the last stream, then steps on what the head makes of it.

The regression (Din et al. 2023, https://arxiv.org/abs/2303.09435) costs no scores of the vocabulary, so that it sees
many more tokens; the steps have the loss of the tuned lens itself (Belrose et al. 2023, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import check_ids, number, whole
from cutaway.generation.fingerprint import model_facts
from cutaway.generation.reading import check_length, read_sources
from cutaway.inspection.readout import blocks, main_stack, spread, table_of, token_head
from cutaway.inspection.record import Recorder
from cutaway.inspection.sites import Texts
from cutaway.inspection.steps import Progress, counted
from cutaway.inspection.tuned_lens import TunedLens, tuned_points
from cutaway.kernels import Stored
from cutaway.models import Transformer
from cutaway.models.batch import pad
from cutaway.models.head import finished
from cutaway.spec import NormSpec


@dataclass(frozen=True, slots=True)
class Maps:
    """An affine map for each layer. [layer, d_model, d_model], [layer, d_model]"""

    weight: Tensor
    bias: Tensor

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        """[token, d_model] → the same."""
        return x + F.linear(x, self.weight[layer], self.bias[layer])


@dataclass(frozen=True, slots=True)
class Steps:
    """How the steps go: how many, with how many texts and positions of each layer, and how far."""

    steps: int
    rows: int
    positions: int
    rate: float


def train_lens(
    model: Transformer,
    texts: Texts,
    *,
    sources: Texts | None = None,
    steps: int = 30,
    rows: int = 4,
    positions: int = 24,
    rate: float = 5e-4,
    ridge: float = 0.1,
    kept: float = 0.1,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> TunedLens:
    """Train a tuned lens. No weight of the model changes; an fp32 copy of the head's matrix is there meanwhile.

    A layer's map is the best of three on texts kept from training: none, the regression, what the steps made of it.

    Args:
        model: with a head that scores tokens.
        texts: token ids, of any lengths; some thousand tokens are a start. sources: of an encoder–decoder.
        steps: how often all maps are corrected. rows: texts each time. positions: of them, drawn for each layer anew.
        rate: of Adam (Kingma & Ba 2015), falling to nothing.
        ridge: how strongly the regression is held back, as a share of the stream's own size.
        kept: share of the texts that is kept from training.
        seed: the same seed, the same lens.
        progress: called with how many parts of the work are done and how many there are; True for a line.

    Raises:
        RequestError: too few texts, or no head that scores tokens.
    """
    reader = _Reader(model, [check_ids(row, model.spec.vocab_size, "texts") for row in texts], sources)
    held_back = max(1, round(number("kept", kept, 0.0, 0.9) * len(reader.texts)))
    if len(reader.texts) <= held_back:
        raise RequestError("too few texts to train on", field="texts", expected="2 or more", got=len(reader.texts))
    how = Steps(
        whole("steps", steps, 0), whole("rows", rows, 1), whole("positions", positions, 1), number("rate", rate, 0)
    )
    number("ridge", ridge, 0)
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(reader.texts), generator=random).tolist()
    held, used = order[:held_back], order[held_back:]
    runs = [used[i : i + rows] for i in range(0, len(used), rows)]
    of = len(runs) + steps + 3
    with counted(progress, of, "parts") as report:
        n, d = len(reader.names), model.spec.d_model
        best = Maps(torch.zeros(n, d, d), torch.zeros(n, d))
        plain = reached = reader.divergence(held, best)
        report(1, of)
        start = regression(reader, runs, ridge, lambda done: report(1 + done, of))
        best, reached = _better(best, reached, start, reader.divergence(held, start))
        report(len(runs) + 2, of)
        last = _stepped(reader, used, best, how, random, lambda done: report(len(runs) + 2 + done, of))
        best, reached = _better(best, reached, last, reader.divergence(held, last))
        report(of, of)
    return TunedLens(tuple(reader.names), best.weight, best.bias, plain, reached, model_facts(model))


class _Reader:
    """Runs texts and says what the stream is at each layer, and what is made of it at the end."""

    def __init__(self, model: Transformer, texts: list[list[int]], sources: Texts | None) -> None:
        head = token_head(model)
        if sources is not None and len(sources) != len(texts):
            raise RequestError("not a source for each text", field="sources", expected=len(texts), got=len(sources))
        check_length(model, max(map(len, texts), default=0), "texts")
        self.model, self.texts, self.sources = model, texts, sources
        self.names = tuned_points(model)
        self.norm, self.head = main_stack(model).norm, head
        last = model.spec.stacks[model.spec.main].layers[-1].branches[-1].name
        self._end = f"{model.spec.main}.layers.{len(self.names) - 1}.{last}.resid"
        table = table_of(model, "output").detach()
        # Made once: gradients through a stored matrix would make its numbers anew for each product.
        self._table = table.dense() if isinstance(table, Stored) else table.float()

    @torch.no_grad()
    def streams(self, which: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Of some texts, without their pads: the stream before each layer, and after the last. [token, d_model]"""
        ids, positions = pad([self.texts[i] for i in which])
        source = None if self.sources is None else read_sources(self.model, [self.sources[i] for i in which])
        tap = Recorder([*self.names, self._end])
        self.model.hidden(ids, positions, tap=tap, source=source)
        real = (positions >= 0).to(self.model.device)
        found = [tap.kept[name][0][real].float() for name in (*self.names, self._end)]
        return found[:-1], found[-1]

    def scores(self, x: Tensor) -> Tensor:
        """Log-probabilities of what stands at the end of the stream. [token, d_model] → [token, vocab]"""
        x = self.head.transform(self.norm(x))
        return finished(F.linear(x, self._table, self.head.bias), self.head.spec).log_softmax(-1)

    @torch.no_grad()
    def divergence(self, which: Sequence[int], maps: Maps) -> Tensor:
        """KL from the end to each layer's map, in nats, a mean over the tokens of some texts. [layer]"""
        total, tokens = torch.zeros(len(self.names)), 0
        for i in which:
            streams, end = self.streams([i])
            for block in blocks(len(end), len(self._table)):
                last = self.scores(end[block])
                for layer, x in enumerate(streams):
                    total[layer] += _apart(last, self.scores(maps(layer, x[block]))).sum()
            tokens += len(end)
        return total / tokens


def _apart(last: Tensor, early: Tensor) -> Tensor:
    """KL from one distribution to another, as log-probabilities. [token, vocab] → [token]"""
    return (last.exp() * (last - early)).sum(-1)


def regression(reader: _Reader, runs: Sequence[Sequence[int]], ridge: float, report: Callable[[int], None]) -> Maps:
    """The affine maps that come nearest to the last stream, each token weighted as the last norm would scale it.

    Args:
        reader: runs texts. runs: which, a few at a time.
        ridge: added to the squares, as a share of their median. report: told how many runs are done.
    """
    n, d = len(reader.names), reader.model.spec.d_model
    squares, products = torch.zeros(n, d + 1, d + 1), torch.zeros(n, d + 1, d)
    norm = main_stack(reader.model).spec.norm or NormSpec("rms", 1e-6)
    for done, run in enumerate(runs):
        streams, end = reader.streams(run)
        weight = spread(norm, end).square()
        for layer, x in enumerate(streams):
            one = F.pad(x, (0, 1), value=1.0)
            squares[layer] += one.t() @ (one * weight)
            products[layer] += one.t() @ ((end - x) * weight)
        report(done + 1)
    solved = torch.empty(n, d + 1, d)
    for layer in range(n):
        square = squares[layer].double()
        held = ridge * square.diagonal()[:d].median().clamp(min=1e-12)
        square.diagonal()[:d].add_(held)  # the shift is not held back
        solved[layer] = torch.linalg.solve(square, products[layer].double()).float()
    return Maps(solved[:, :d].transpose(1, 2).contiguous(), solved[:, d].contiguous())


def _stepped(
    reader: _Reader,
    used: Sequence[int],
    start: Maps,
    how: Steps,
    random: torch.Generator,
    report: Callable[[int], None],
) -> Maps:
    """Steps down the KL from the end to each layer, for all layers with the same texts."""
    weights, biases = ([t.clone().requires_grad_() for t in ts] for ts in (start.weight, start.bias))
    optimiser = torch.optim.Adam([*weights, *biases], lr=how.rate)
    for step in range(how.steps):
        for group in optimiser.param_groups:
            group["lr"] = how.rate * 0.5 * (1 + math.cos(math.pi * step / how.steps))
        chosen = torch.randperm(len(used), generator=random)[: how.rows].tolist()
        streams, end = reader.streams([used[i] for i in chosen])
        for layer, x in enumerate(streams):
            some = torch.randperm(len(end), generator=random)[: how.positions]
            with torch.no_grad():
                last = reader.scores(end[some])
            with torch.enable_grad():
                y = x[some] + F.linear(x[some], weights[layer], biases[layer])
                loss = _apart(last, reader.scores(y)).mean()
            # Of the maps alone: the model's own weights get no gradient.
            weights[layer].grad, biases[layer].grad = torch.autograd.grad(loss, [weights[layer], biases[layer]])
        optimiser.step()
        report(step + 1)
    return Maps(torch.stack([w.detach() for w in weights]), torch.stack([b.detach() for b in biases]))


def _better(best: Maps, reached: Tensor, new: Maps, now: Tensor) -> tuple[Maps, Tensor]:
    """Each layer's better map, and how far from the end it is."""
    take = now < reached
    weight = torch.where(take[:, None, None], new.weight, best.weight)
    return Maps(weight, torch.where(take[:, None], new.bias, best.bias)), torch.where(take, now, reached)
