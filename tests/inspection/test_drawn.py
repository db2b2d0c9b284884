"""Figures in a terminal and on a page: what they say, whether they fit, and that no text of theirs is markup."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console

from cutaway.inspection import head_scores, lens, pattern
from cutaway.inspection.drawn.page import document, fragment
from cutaway.inspection.drawn.terminal import Drawing, plain_text, text_of
from cutaway.inspection.drawn.words import Numbers, shared, strength
from cutaway.inspection.figure import Bars, Figure, Grid, Rows, Words
from cutaway.look import Look, width
from tests.reference import tiny

ESCAPE = re.compile("\x1b\\[[0-9;]*m")
TINTED = re.compile("48;[25];|;(4|10)[0-7]m")  # rich keeps a style's codes from the first console that it met
EVIL = "<script>alert('x')</script>\x1b[31m\n"


def everything(word: str = " Paris") -> Figure:
    names = [f"decoder.layers.{i}.attn" for i in range(3)]
    values = [[0.0, 0.5, None], [1.0, float("nan"), 0.25], [0.1, 0.2, 0.3]]
    signed = [[-2.0, 0.0, 1.0], [2.0, -0.5, 0.004], [None, 1.5, -1.5]]
    texts = [[word] * 3] * 3
    return Figure(
        f"All of {word}",
        (
            Grid("Shares", names, [word, "b", "c"], values, None, "share", "position", "layer"),
            Grid("Words", names, [word, "b", "c"], signed, texts, "signed"),
            Bars("Bars", [word, "other"], [3.0, -1.5], "nats", "signed", ["first", word]),
            Words("A text", [word, " is", " in"], [0.5, -1.0, None], "nats"),
            Rows("A table", ["name", "value"], [[word, 0.5], ["b", 12345]]),
        ),
        (f"A note about {word}, which is long enough that it has to be put on more than one line of a terminal.",),
    )


@pytest.mark.parametrize("columns", [24, 40, 80, 132])
@pytest.mark.parametrize("plain", [False, True])
def test_it_fits_and_colour_is_never_alone(columns: int, plain: bool) -> None:
    """Without colours every letter is as with them, and no line is too long."""
    coloured, bare = (text_of(everything(), Look(columns, colour, plain)) for colour in (True, False))
    assert ESCAPE.sub("", coloured) == bare
    assert "\x1b" not in bare
    assert all(width(line) <= columns for line in bare.splitlines())
    assert bare.isascii() is plain
    if columns >= 40:
        for number in (".50", "-2.00" if plain else "−2.00", "+1.00", "12,345"):
            assert number in bare, number


def test_numbers_stand_in_their_cells() -> None:
    lines = plain_text(everything()).splitlines()
    at = lines.index("layer *: decoder.layers.*.attn")
    assert lines[at + 2].split() == ["0", "0", ".50"]
    assert lines[at + 3].split() == ["1", "1", ".25"]


def test_a_wide_grid_goes_on_below() -> None:
    names = [f"column {i}" for i in range(40)]
    figure = Figure("Wide", (Grid("g", ["a", "b"], names, [[i / 40 for i in range(40)]] * 2, None, "share"),))
    text = text_of(figure, Look(60))
    assert all(width(line) <= 60 for line in text.splitlines())
    assert text.count(".95") == 2  # the 38th column of both rows
    large = Figure("Large", (Grid("g", ["a"] * 300, names * 5, [[0.5] * 200] * 300),))
    assert "The first 100 of 300 rows and" in text_of(large, Look(60))


def test_no_colour_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True).print(Drawing(everything()))
    assert not TINTED.search(out.getvalue())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system="truecolor", no_color=False)
    console.print(Drawing(everything()))
    assert TINTED.search(out.getvalue())
    out = io.StringIO()
    Console(file=out, width=80).print(Drawing(everything()))
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("look", [Look(80, True), Look(80), Look(80, plain=True)])
def test_a_token_commands_no_terminal(look: Look) -> None:
    text = text_of(everything(EVIL), look)
    assert "\x1b[31m" not in text.replace("\x1b[31m\x1b", "")
    assert "\\x1b[31m" in text


class Tags(HTMLParser):
    """Counts tags, and finds what is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.told: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.told.append(data)


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags.open == []
    return tags


def test_a_page_is_tables_without_a_script() -> None:
    tags = parsed(document(everything(EVIL)))
    assert "script" not in tags.seen
    assert not {"link", "img", "iframe", "object"} & {*tags.seen}
    assert tags.seen["table"] == tags.seen["caption"] == 4
    assert "<script>alert('x')</script>" in "".join(tags.told)  # as text
    for number in (".50", "−2.00", "12,345", "+3.00"):
        assert number in "".join(tags.told)


def test_a_page_is_never_large() -> None:
    """Whatever there is, less than 300 KB; and what was left out is said."""
    n = 300
    grid = Grid("g", [EVIL * 5] * n, [EVIL * 5] * n, [[0.5] * n] * n, [[EVIL * 9] * n] * n, "signed")
    words = Words("w", [EVIL * 9] * 5000, [1.0] * 5000)
    bars = Bars("b", [EVIL * 9] * 5000, [1.0] * 5000)
    page = fragment(Figure("Large", (grid, words, bars, grid)))
    assert len(page.encode()) < 300_000
    assert re.search(r"the first \d+ of 300 rows; the first \d+ of 300 columns", page)
    assert re.search(r"the first [\d,]+ of 5,000 pieces", page)
    parsed(page)


def test_results_show_themselves() -> None:
    model = tiny.transformer("llama")
    ids = tiny.ids(7, seed=1).tolist()
    for result in (lens(model, ids), head_scores(model, [ids, ids])):
        assert len(repr(result)) < 500
        assert "tensor(" not in repr(result)
        assert str(result).startswith(result.figure().title)
        assert "<table>" in result._repr_html_()
        out = io.StringIO()
        Console(file=out, width=80).print(result)
        assert result.figure().title in out.getvalue()


def test_who_reads_whom_is_query_by_key() -> None:
    """In both drawings; of several heads, head by key. The text of a page has it too."""
    model, ids = tiny.transformer("llama"), [3, 4, 5]
    for heads, axes in ([1], "query by key"), (None, "head by key"):
        found = pattern(model, ids, "decoder.layers.0.attn", heads)
        assert axes in str(found)
        assert axes in found._repr_html_()
        assert "by read" not in str(found) + found._repr_html_()


def test_few_letters() -> None:
    assert [Numbers([0.123, 1.0], "share")(value) for value in (0.123, 1.0, 0.001, None)] == [".12", "1", "0", ""]
    assert [Numbers([5.0, 20_000.0], "plain")(value) for value in (5.0, 20_000.0)] == ["5", "20k"]
    assert Numbers([1e-5], "plain")(1e-5) == "1.0e-5"
    assert shared(["embed.out", "logits"]) == (["embed.out", "logits"], "")
    assert shared(["a.b", "a.c"]) == (["b", "c"], "a.*")
    assert strength(float("nan"), (0.0, 1.0)) == 0
    assert strength(torch.inf, (0.0, 1.0)) == 5
