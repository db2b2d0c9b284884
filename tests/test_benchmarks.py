"""The page of results says what its files say: ratios by hand, verdicts, and what was never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.all import ROWS, chosen
from benchmarks.chart import chart
from benchmarks.claims import CLAIMS, Claim
from benchmarks.results import line, page

MACHINE = {"date": "2026-01-02", "processor": "P", "cores": 2, "threads": 2, "load": 0.5}


def result(unit: str, **values: list[float]) -> dict[str, Any]:
    return {"unit": unit, "values": {name.replace("_", " "): found for name, found in values.items()}}


def test_more_is_better_of_rates_and_less_of_times() -> None:
    claim = Claim("row", "r", "peer", 1.5)
    assert claim.ratios(result("tokens/s", cutaway=[10.0, 30.0], peer=[5.0, 10.0])) == [2.0, 3.0]
    assert claim.ratios(result("s", cutaway=[10.0, 30.0], peer=[5.0, 10.0])) == pytest.approx([1 / 2, 1 / 3])
    assert (claim.met(1.5), claim.met(1.49)) == (True, False)


def test_at_most_and_first_and_share() -> None:
    memory = Claim("row", "r", "peer", 1.5, "at most")
    assert memory.ratios(result("MiB", cutaway=[30.0], peer=[10.0])) == [3.0]
    assert (memory.met(1.5), memory.met(1.51)) == (True, False)
    first = Claim("row", "r", "peer", 1.0, "first")
    assert first.ratios(result("s", cutaway=[3.0], import_torch=[1.0], peer=[2.0])) == [3 / 4]
    share = Claim("row", "r", "the memory", 0.8, "share")
    assert share.ratios({**result("tokens/s", cutaway=[1.0]), "limit": {"shares": [0.7, 0.9]}}) == [0.7, 0.9]


def test_lines_say_whether_it_was_met_and_by_how_many_rounds() -> None:
    claim = Claim("row", "r", "peer", 1.5)
    five = result("tokens/s", cutaway=[10.0, 20.0, 30.0, 40.0, 50.0], peer=[10.0] * 5)
    assert line(claim, {"r": five}) == [
        "row",
        "peer",
        "30 tokens/s",
        "10 tokens/s",
        "3.00 (1.00 to 5.00)",
        "≥ 1.5",
        "yes",
    ]
    assert line(claim, {"r": result("tokens/s", cutaway=[10.0], peer=[10.0])})[-1] == "**no** (1 rounds: too few)"
    assert line(claim, {})[2:] == ["", "", "", "≥ 1.5", "never run"]


def test_a_page_of_nothing_says_so(tmp_path: Path) -> None:
    said = page({}, tmp_path)
    assert said.count("| never run |") == len(CLAIMS)
    assert "has never run on a CUDA machine" in said
    (tmp_path / "gpu.md").write_text("| a table |\n")
    said = page({"r": {"machine": MACHINE, **result("s", cutaway=[1.0]), "agree": {"peer": "alike"}}}, tmp_path)
    assert "| a table |" in said
    assert "| r | peer | alike |  |" in said
    assert "| r | 2026-01-02 | P, 2 of 2 cores | 0.5 | 1 |" in said


def test_every_claim_has_a_row_that_measures_it() -> None:
    named = {f"{script}-{row}".strip("-").replace("_t", "-t") for script, row in chosen([])}
    assert {claim.result for claim in CLAIMS} <= named
    assert chosen(["decode:q4_1", "encode"]) == [("decode", "q4_1"), ("encode", "short"), ("encode", "long")]
    assert len(chosen([])) == sum(map(len, ROWS.values()))
    for wrong in ("decod", "decode:q9"):
        with pytest.raises(SystemExit):
            chosen([wrong])


def test_a_chart_has_its_points_where_they_belong() -> None:
    """Logarithmic: equal ratios are equal distances."""
    points = [(1.0, 1.0, 0.5, 2.0), (10.0, 10.0, 9.0, 11.0), (100.0, 100.0, 90.0, 110.0)]
    drawn = chart("t", "x", "y", {"a": points}, {"a": points})
    circles = [part.split('"') for part in drawn.split("<circle ")[1:]]
    (x0, y0), (x1, y1), (x2, y2) = ((float(part[1]), float(part[3])) for part in circles)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)
    assert y2 < y0  # up
