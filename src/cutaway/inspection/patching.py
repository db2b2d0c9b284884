"""Activation patching: put what one text's run computed into another's, piece by piece, and see which piece matters.

Vig et al. 2020; Meng et al. 2022; what to mind: Heimersheim & Nanda 2024, https://arxiv.org/abs/2404.15255.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from cutaway.errors import NameNotFound, RequestError
from cutaway.generation.checks import whole
from cutaway.inspection.figure import Bars, Figure, Grid
from cutaway.inspection.metrics import Metric, words_of
from cutaway.inspection.pairs import Align, places_beside
from cutaway.inspection.readout import Spell, labels, numbers
from cutaway.inspection.shown import Shown, for_json
from cutaway.inspection.sites import (
    HEADS,
    Asked,
    Site,
    Texts,
    answers_at,
    check_at,
    check_texts,
    stream_of,
    swept,
)
from cutaway.inspection.steps import Progress
from cutaway.inspection.target import places_in
from cutaway.inspection.where import TOKENS, counted_along
from cutaway.models import Transformer
from cutaway.spec.names import axis_sizes, match, tap_names

Over: TypeAlias = Literal["position", "head", "branch"]
Direction: TypeAlias = Literal["denoise", "noise"]


@dataclass(frozen=True, slots=True, repr=False)
class Sweep(Shown):
    """What a metric became for each piece that was put from one run into another.

    Attributes:
        rows: names of the quantities. columns: a label for each position or head.
        across: ``"position"`` or ``"head"``.
        values: the metric, a mean over the pairs of texts; NaN where there is no such piece. [row, column]
        clean, corrupt: what it is without any change.
        metric: what was asked, in words.
        direction: ``"denoise"``: clean pieces in the corrupt run; ``"noise"``: corrupt ones in the clean run.
        notes: what has to be said of these texts.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    across: str
    values: Tensor
    clean: float
    corrupt: float
    metric: str
    direction: Direction
    notes: tuple[str, ...] = ()

    @property
    def normalised(self) -> Tensor:
        """(patched − corrupt) / (clean − corrupt): 0 as in the corrupt run, 1 as in the clean one. [row, column]"""
        apart = self.clean - self.corrupt
        return (self.values - self.corrupt) / apart if apart else torch.full_like(self.values, float("nan"))

    def top(self, n: int = 10) -> list[tuple[str, str, float]]:
        """The pieces that matter most, by the normalised metric: (quantity, column, how much)."""
        found = self.normalised if self.direction == "denoise" else 1 - self.normalised
        flat = found.flatten().nan_to_num(nan=float("-inf"))
        width = len(self.columns)
        best = flat.topk(min(whole("n", n, 0), len(flat))).indices.tolist()
        every = [(self.rows[i // width], self.columns[i % width], float(self.normalised.flatten()[i])) for i in best]
        return [one for one in every if one[2] == one[2]]

    def figure(self) -> Figure:
        """A grid, and the two runs."""
        down = "quantity" if self.across == "position" else "layer"
        title = "Clean pieces in the corrupt run" if self.direction == "denoise" else "Corrupt pieces in the clean run"
        grid = Grid(title, self.rows, self.columns, numbers(self.normalised), None, "signed", self.across, down)
        ends = Bars(self.metric, ["clean", "corrupt"], [self.clean, self.corrupt], "", "plain")
        said = (
            "0 is the corrupt run, 1 the clean one: (patched − corrupt) / (clean − corrupt), the model's own numbers."
        )
        least = "A piece that restores much is enough by itself; others may be as good, or needed as well."
        most = "A piece whose loss costs much is needed; what makes up for a loss hides others that matter."
        notes = (*self.notes, said, least if self.direction == "denoise" else most)
        return Figure("Activation patching", (grid, ends), notes)

    @for_json
    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        head = {"rows": [*self.rows], "columns": [*self.columns], "across": self.across, "metric": self.metric}
        values = {"values": numbers(self.values), "normalised": numbers(self.normalised)}
        return {
            **head,
            **values,
            "clean": self.clean,
            "corrupt": self.corrupt,
            "direction": self.direction,
            "notes": [*self.notes],
        }


@torch.no_grad()
def patch_sweep(
    model: Transformer,
    clean: Texts,
    corrupt: Texts,
    metric: Metric,
    over: Over = "position",
    *,
    at: str | None = None,
    direction: Direction = "denoise",
    positions: Sequence[int] | None = None,
    align: Align = None,
    stack: str | None = None,
    answer_at: int | None = None,
    clean_sources: Texts | None = None,
    corrupt_sources: Texts | None = None,
    batch: int = 32,
    progress: Progress | bool | None = None,
    pieces: Sequence[str] | None = None,
    source_pieces: Sequence[str] | None = None,
    spell: Spell | None = None,
) -> Sweep:
    """Patch every layer × position, layer × head, or (attention, feed-forward) × position.

    Args:
        model: one that scores tokens or labels.
        clean, corrupt: texts in pairs, all of one length, such as two that differ in a name; see ``align``.
        metric: see :func:`logit_difference`, :func:`log_probability`; a :class:`Target`; or a function of the scores at
            one position, [..., pair, vocab] → [..., pair]. Its mean over the pairs is what is told.
        over: ``"position"``: the stream before each layer, at each position. ``"head"``: what each head reads, at all
            positions. ``"branch"``: what each branch adds, at each position.
        at: another quantity of each layer: ``"mlp.act"``, or of heads ``"attn.q"``, ``"cross.z"``.
        direction: whether clean pieces are put into the corrupt run, or the other way round.
        positions: the only ones to patch; of heads, these together.
        align: ``"end"``: clean texts may be longer or shorter than corrupt ones, and a place is as far from the end in
            both, counted in the clean text. What comes before the shorter one's second token is not patched.
        stack: whose layers; by default those that end at the head.
        answer_at: the position whose scores are asked; by default the last, where that has a meaning.
        clean_sources, corrupt_sources: of an encoder–decoder, what its encoder reads; ``clean`` and ``corrupt`` are
            what its decoder reads, and may be the same.
        batch: at most so many texts in a pass.
        progress: called with how many runs are done and how many there are; True for a line.
        pieces, source_pieces: a text for each token of the first clean text, and of its source.
        spell: a token's id → how it is written.

    Raises:
        NameNotFound: no layer has such a quantity.
        RequestError: texts that are no pairs, a metric that gives something else.
    """
    batch = whole("batch", batch, 1)
    if align not in (None, "end"):
        raise RequestError("no such way to align", field="align", expected="end, or None", got=align)
    if direction not in ("denoise", "noise"):
        raise RequestError("no such direction", field="direction", expected="denoise or noise", got=direction)
    texts = [check_texts(model, name, rows) for name, rows in (("clean", clean), ("corrupt", corrupt))]
    given = [clean_sources, corrupt_sources if corrupt_sources is not None else clean_sources]
    sources = [None if rows is None else check_texts(model, "sources", rows, of_source=True) for rows in given]
    for one in (texts, [source for source in sources if source is not None]):
        sizes = [[len(row) for row in rows] for rows in one]
        if sizes and (len(sizes[0]) != len(sizes[1]) or (sizes[0] != sizes[1] and align is None)):
            hint = 'align="end" counts places from the end.' if len(sizes[0]) == len(sizes[1]) else None
            what = "texts are no pairs of one length"
            raise RequestError(what, field="corrupt", expected=sizes[0], got=sizes[1], hint=hint)
    stack = stack or model.spec.main
    names = _names(model, stack, over, at)
    place = check_at(model, answer_at, len(texts[0][0])) - len(texts[0][0])
    if place < -len(texts[1][0]):
        raise RequestError("the corrupt text has no token there", field="answer_at", got=answer_at)
    runs = [Asked(model, rows, metric, place, source) for rows, source in zip(texts, sources, strict=True)]
    streams = [*dict.fromkeys(map(stream_of, names))]
    seen = [run.run([*names, *streams, answers_at(model)]) for run in runs]
    base, other = (0, 1) if direction == "noise" else (1, 0)

    axes = tap_names(model.spec)
    of_source = _of_source(names, axes)
    read, other_read = (
        (source or rows)[0] if of_source else rows[0] for rows, source in zip(texts, sources, strict=True)
    )
    # From the end, where texts of two lengths have the same places.
    chosen = places_beside((len(read), len(other_read)), places_in(len(read), positions), positions is not None)
    columns, sites = _sites(model, names, over, chosen)
    notes = _apart(names, axes, texts, sources, (len(read), len(other_read)))
    # Where both runs have the same, such as before the first token that differs, nothing would change.
    alike = [torch.equal(*(run[site.name][site.index(axes[site.name], slice(None))] for run in seen)) for site in sites]
    told = [run.told(one).mean().item() for run, one in zip(runs, seen, strict=True)]
    odd = [site for site, same in zip(sites, alike, strict=True) if not same]
    values = torch.full((len(sites),), told[base], dtype=torch.float64)
    if odd:
        patched = swept(
            runs[base],
            odd,
            seen[other],
            {k: seen[base][k] for k in streams},
            batch=batch,
            progress=progress,
            what="pieces",
        )
        values[torch.tensor(alike).logical_not()] = patched.mean(1)
    grid = torch.full((len(names), columns), float("nan"), dtype=torch.float64)
    for site, value in zip(sites, values.tolist(), strict=True):
        column = site.head if over == "head" else chosen.index(site.position)  # type: ignore[arg-type]
        grid[names.index(site.name), column] = value
    shown = labels(read, source_pieces if of_source else pieces)
    across = [str(i) for i in range(columns)] if over == "head" else [shown[i] for i in chosen]
    said = words_of(metric, spell)
    kind = "head" if over == "head" else "position"
    return Sweep(tuple(names), tuple(across), kind, grid, told[0], told[1], said, direction, tuple(notes))


def _apart(
    names: Sequence[str], axes: Mapping[str, Sequence[str]], texts: Sequence[Texts], sources: Sequence[Texts | None],
    lengths: tuple[int, int],
) -> list[str]:  # fmt: skip
    """What has to be said of texts of two lengths.

    Raises:
        RequestError: a quantity has a number for each token that is read.
    """
    odd = {"key"} if len(texts[0][0]) != len(texts[1][0]) else set()
    if sources[0] and sources[1] and len(sources[0][0]) != len(sources[1][0]):
        odd |= {"source_key", "source"}
    for name in names:
        if odd & ({*axes[name]} - {counted_along(axes[name])}):
            what = "has a number for each token that is read, and these texts have not as many"
            raise RequestError(what, field=name, hint="Choose texts of one length.")
    if lengths[0] == lengths[1]:
        return []
    said = "The texts are of {} and {} tokens, aligned from the end: a piece comes from another position than it "
    return [said.format(*lengths) + "is put into."]


def _of_source(names: Sequence[str], axes: Mapping[str, Sequence[str]]) -> bool:
    """Whether positions are those of the source.

    Raises:
        RequestError: of some quantities they are, and of others not.
    """
    along = {counted_along(axes[name]): name for name in names}
    if len(along) > 1:
        what = "positions are of the source in one of these and of the target in the other"
        raise RequestError(what, field="at", got=", ".join(along.values()), hint="Name one, such as cross.k.")
    return "source" in along


def _names(model: Transformer, stack: str, over: Over, at: str | None) -> list[str]:
    """The quantities that a sweep goes over, in order."""
    axes = tap_names(model.spec)
    if stack not in model.spec.stacks:
        raise RequestError("no such stack", field="stack", expected=", ".join(model.spec.stacks), got=stack)
    usual = {"position": ["resid_in"], "head": ["attn.z"], "branch": ["*.out"]}
    if over not in usual:
        raise RequestError("no such sweep", field="over", expected="position, head or branch", got=over)
    if at is not None and not isinstance(at, str):
        raise RequestError("not a name", field="at", expected="one name within a layer, such as mlp.act", got=at)
    found = match([f"{stack}.layers.*.{one}" for one in ([at] if at else usual[over])], axes)
    wanted, what = (HEADS, "heads") if over == "head" else (TOKENS, "positions")
    kept = [name for name in found if any(word in wanted for word in axes[name])]
    if not kept:
        raise NameNotFound(f"has no {what}", field=f"{stack}.layers.*.{at}", hint="`cutaway show --taps` lists all.")
    return kept


def _sites(model: Transformer, names: Sequence[str], over: Over, positions: list[int]) -> tuple[int, list[Site]]:
    """How many columns there are, and every piece."""
    if over != "head":
        return len(positions), [Site(name, place) for name in names for place in positions]
    axes = tap_names(model.spec)
    found = []
    for name in names:
        word = next(word for word in axes[name] if word in HEADS)
        found += [Site(name, tuple(positions), head) for head in range(axis_sizes(model.spec, name)[word])]
    return 1 + max(site.head or 0 for site in found), found
