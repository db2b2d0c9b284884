"""How far a batch has come."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from cutaway.errors import RequestError
from cutaway.generation import progress
from cutaway.generation.progress import Tally, meter
from cutaway.model import Model
from tests.reference import tiny

PROMPTS = [tiny.ids(n, seed=n).tolist() for n in (5, 3, 9)]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny.transformer("llama"))


def test_a_function_is_told(model: Model) -> None:
    """Before each pass, and at the end, of all answers; the results are those without it."""
    told: list[Tally] = []
    how = {"max_tokens": 6, "temperature": 1.0, "seed": 1, "n": 2}
    found = model.generate(PROMPTS, progress=told.append, **how)
    assert found == model.generate(PROMPTS, **how)
    assert told[0] == Tally(0, 6, 0)
    assert told[-1] == Tally(6, 6, sum(len(one.tokens) for one in found))
    assert [t.tokens for t in told] == sorted(t.tokens for t in told)
    assert len(told) >= 7


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"max_tokens": 0}, {"max_tokens": 0, "prompt_logprobs": 1}])
def test_it_ends_whole(model: Model, how: dict[str, int]) -> None:
    told: list[Tally] = []
    found = model.generate(PROMPTS, progress=told.append, **{"max_tokens": 5, "temperature": 0, **how})
    assert told[-1] == Tally(3, 3, sum(len(one.tokens) for one in found))


def test_what_a_function_raises_breaks_off(model: Model) -> None:
    def enough(tally: Tally) -> None:
        if tally.tokens >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPTS, progress=enough, max_tokens=20)
    with pytest.raises(RequestError, match="progress"):
        model.generate(PROMPTS, progress="yes")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, step: float) -> str:
    """What is shown of 100 reports, a step of time apart."""
    monkeypatch.setenv("TERM", "xterm")
    now = [0.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    with meter(True, stream=stream, clock=clock) as report:
        assert report is not None
        for tokens in range(100):
            now[0] += step
            report(Tally(tokens // 10, 10, tokens * 10))
    return stream.getvalue()


def test_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes ten times a second at most, and goes away."""
    out = shown(Terminal(), monkeypatch, 0.0625)
    assert out.startswith("\r\x1b[K0 of 10 answers, 0 tokens, 0.0 tokens/s\r\x1b[K")
    assert out.endswith("\r\x1b[K")
    assert "\n" not in out
    assert out.count("answers") == 50


def test_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """One every five seconds, and the last one; nothing of what took no time."""
    lines = shown(io.StringIO(), monkeypatch, 0.3).splitlines()
    assert len(lines) == 6
    assert lines[-1] == "9 of 10 answers, 990 tokens, 33.0 tokens/s"
    assert "\x1b" not in "".join(lines)
    assert shown(io.StringIO(), monkeypatch, 0.001) == ""


def test_nothing_unless_asked(
    model: Model, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model.generate(PROMPTS, max_tokens=3)
    model.generate(PROMPTS, max_tokens=3, progress=False)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "SELDOM", 0.0)
    model.generate(PROMPTS, max_tokens=3, progress=True)
    out, err = capsys.readouterr()
    assert "3 of 3 answers" in err
    assert out == ""
