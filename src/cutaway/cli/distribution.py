"""The next token's distribution, computed and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutaway.cli.text import Cell, Look, bar, cut, rounded, table, visible, width

if TYPE_CHECKING:
    from cutaway.model import Model


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may come next."""

    id: int
    text: str  # its bytes as text
    data: bytes
    special: bool
    probability: float
    logit: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """The likeliest next tokens of a prompt.

    Attributes:
        best: best first.
        rest: probability of all others.
        entropy: of the whole distribution, in bits.
        n_tokens: length of the prompt.
        n_others: tokens not in ``best``.
        answers: whether the token begins an answer (of an encoder–decoder) instead of going on with the prompt.
    """

    prompt: str
    best: tuple[Candidate, ...]
    rest: float
    entropy: float
    n_tokens: int
    n_others: int
    answers: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "prompt": self.prompt,
            "prompt_tokens": self.n_tokens,
            "entropy_bits": self.entropy,
            "rest": self.rest,
            "candidates": [
                {"rank": rank, "token": c.id, "text": c.text, "bytes": list(c.data), "special": c.special}
                | {"probability": c.probability, "logit": c.logit}
                for rank, c in enumerate(self.best, 1)
            ],
        }


COLDEST = 1e-3  # below this it counts as 0: the best token has all of it anyway


def predict(model: Model, prompt: str, ids: list[int], top: int, temperature: float) -> tuple[Distribution, Any]:
    """The distribution after ``ids``, or of the answer to them, and all its log-probabilities. [vocab]"""
    import torch

    from cutaway.generation.logits import check_finite

    answers = model.spec.source is not None
    rows = model.trace(ids, "logits")["logits"] if answers else model.logits(ids)
    assert isinstance(rows, torch.Tensor)
    logits = rows[0, -1].float().cpu()
    check_finite(logits[None])
    if temperature >= COLDEST:
        logprobs = (logits.double() / temperature).log_softmax(-1)
    else:  # the first of the best has it all, as in generating
        logprobs = torch.full_like(logits, float("-inf"), dtype=torch.float64).index_fill(0, logits.argmax(), 0.0)
    probabilities = logprobs.exp()
    # by logit: probabilities that are all 0, or all equal, have no order of their own
    chosen = logits.sort(descending=True, stable=True).indices[:top].tolist()
    if model.tokenizer is None:
        texts = [(f"<{token}>", b"", False) for token in chosen]
    else:
        texts = [(p.text, p.bytes, p.special) for p in model.tokenizer.target.pieces(chosen)]
    best = tuple(
        Candidate(token, *text, float(probabilities[token]), float(logits[token]))
        for token, text in zip(chosen, texts, strict=True)
    )
    entropy = float(-(probabilities * logprobs).nan_to_num().sum() / torch.tensor(2.0).log())
    rest = max(0.0, 1.0 - sum(c.probability for c in best))
    return Distribution(prompt, best, rest, abs(entropy), len(ids), len(logits) - len(best), answers), logprobs


def divergence(p: Any, q: Any) -> float:
    """Jensen-Shannon divergence of two log-distributions, in bits: 0 for equal, 1 for nothing in common. [vocab]"""
    import torch

    middle = torch.logaddexp(p, q) - torch.tensor(2.0, dtype=p.dtype).log()
    parts = [(x.exp() * (x - middle)).nan_to_num().sum() for x in (p, q)]
    return max(0.0, float((parts[0] + parts[1]) / 2 / torch.tensor(2.0).log()))


def token_label(candidate: Candidate, look: Look) -> Cell:
    """A token as one can see it; bytes that are no whole character in hexadecimal."""
    if candidate.special:
        return Cell(visible(candidate.text, look), "magenta")
    try:
        candidate.data.decode("utf-8")
    except UnicodeDecodeError:
        return Cell(f"<{candidate.data.hex(' ').upper()}>", "yellow")
    return Cell(visible(candidate.text, look) or '""', "")


def percent(share: float) -> str:
    """
    >>> percent(0.6134), percent(0.00004)
    ('61.3 %', '<0.1 %')
    """
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def draw(distribution: Distribution, look: Look, *, shared: frozenset[int] = frozenset()) -> list[str]:
    """The distribution as bars within ``look.width`` columns; candidates in ``shared`` are marked."""
    labels = [token_label(c, look) for c in distribution.best]
    logits = look.width >= 44
    name_room = max(8, min(24, look.width // 3))
    others = f"{distribution.n_others:,} others"
    names = max(*(width(label.text) for label in labels), len(others), 4)
    names = min(names, name_room)
    room = max(look.width - names - 2 - 8 - (9 if logits else 0) - (2 if shared else 0), 4)
    most = distribution.best[0].probability if distribution.best else 1.0
    rows: list[list[str | Cell]] = []
    for rank, (candidate, label) in enumerate(zip(distribution.best, labels, strict=True)):
        strip = bar(candidate.probability / most, room, look)
        row: list[str | Cell] = [
            Cell(cut(label.text, names, look), label.style or ("bold" if rank == 0 else "")),
            Cell(strip.ljust(room), "green" if rank == 0 else "cyan"),
            Cell(percent(candidate.probability), "bold" if rank == 0 else ""),
        ]
        if shared:
            row.insert(0, Cell(("*" if look.plain else "•") if candidate.id in shared else " ", "yellow"))
        if logits:
            row.append(Cell(f"{candidate.logit:.2f}", "dim"))
        rows.append(row)
    if distribution.n_others:
        strip = bar(min(1.0, distribution.rest / most), room, look)
        if width(others) > names:
            others = cut(f"{rounded(distribution.n_others)} others", names, look)
        row = [Cell(others, "dim"), Cell(strip.ljust(room), "dim"), Cell(percent(distribution.rest), "dim")]
        rows.append([*([""] if shared else []), *row, *([""] if logits else [])])
    align = ("l" if shared else "") + "llr" + ("r" if logits else "")
    return table(rows, align, look, gives=align.index("l"), gap=1)
