"""The entry: what it imports, what it says, and how it ends."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import click
import pytest

from cutaway import errors
from cutaway.cli.failures import guarded
from cutaway.cli.group import cli
from cutaway.cli.main import TOUR, VERBS
from cutaway.cli.options import Count, Device

HEAVY = ("torch", "numpy", "rich", "tokenizers", "huggingface_hub", "jinja2", "safetensors")
NAMES = [verb for verbs in VERBS.values() for verb in verbs]


def test_help_and_import_bring_in_nothing_heavy() -> None:
    code = f"""
import sys
import cutaway
from cutaway.cli.group import invoke
heavy = lambda: sorted(set({HEAVY!r}) & set(sys.modules))
print("import", heavy(), file=sys.stderr)
assert invoke(["--help"]) == 0
print("help", heavy(), file=sys.stderr)
assert not [verb for verb in {NAMES!r} if "cutaway.cli." + verb in sys.modules]
for verb in {NAMES!r}:
    assert invoke([verb, "--help"]) == 0
assert invoke(["models", "--json"]) == 0
print("verbs", heavy(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == ["import []", "help []", "verbs []"], done.stderr
    assert done.returncode == 0


def test_alone_it_gives_a_tour_of_five_lines(call: Callable[..., Any]) -> None:
    done = call()
    assert (done.code, done.out) == (0, TOUR)
    lines = TOUR.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("cutaway ") and len(line) <= 100 for line in lines)


def test_help_lists_every_verb_with_its_own_first_line(call: Callable[..., Any]) -> None:
    out = call("-h").out
    with click.Context(cli) as context:
        for verbs in VERBS.values():
            for verb, line in verbs.items():
                assert f"{verb} " in out
                assert line in out
                command = cli.get_command(context, verb)
                assert command is not None
                assert command.name == verb
                assert call(verb, "-h").code == 0
    assert call("--version").out.startswith("cutaway ")


@pytest.mark.parametrize(("wrong", "right"), [("shwo", "show"), ("token", "tokenize"), ("Run", "run"), ("pul", "pull")])
def test_an_unknown_verb_is_usage_with_a_guess(call: Callable[..., Any], wrong: str, right: str) -> None:
    done = call(wrong, "x")
    assert (done.code, done.out) == (2, "")
    assert wrong in done.err
    assert f"did you mean {right}" in done.err


def test_a_verb_like_no_other_gets_no_guess(call: Callable[..., Any]) -> None:
    done = call("qqqqqq")
    assert done.code == 2
    assert "did you mean" not in done.err
    assert "cutaway --help" in done.err


@pytest.mark.parametrize("verb", NAMES)
def test_an_unknown_flag_is_usage_with_a_guess(call: Callable[..., Any], verb: str) -> None:
    done = call(verb, "--quite")
    if verb == "completion":
        assert done.code == 2
        return
    assert done.code == 2
    assert "no such option '--quite'" in done.err.lower()
    assert "--quiet" in done.err
    assert len(done.err.splitlines()) == 3


def test_usage_errors_are_json_where_json_was_asked_for(call: Callable[..., Any]) -> None:
    done = call("run", "hi", "--json", "--top-k", "many")
    assert done.code == 2
    assert set(done.error) == {"code", "message", "path", "field", "hint"}
    assert done.error["code"] == "usage"
    assert done.error["field"] == "top_k"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RequestError("x"), 2),
        (errors.ConfigError("x"), 3),
        (errors.TruncatedError("x"), 3),
        (errors.ContextExceeded("x"), 3),
        (errors.StorageError("x"), 4),
        (errors.ResourceError("x"), 4),
        (errors.OfflineError("x"), 5),
        (errors.DownloadError("x"), 5),
        (MemoryError(), 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), 4),
        (OSError(errno.ENOSPC, "No space left on device"), 4),
        (ZeroDivisionError("division by zero"), 70),
        (KeyError("x"), 70),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (BrokenPipeError(), 141),
        (SystemExit(143), 143),
        (SystemExit(None), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_every_ending_has_its_exit_code(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert guarded(fail, []) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    lines = said.splitlines()
    if code in (130, 141, 143, 0):
        assert lines == []
    else:
        assert len(lines) == 3
        assert lines[0].startswith("error: ")
        assert lines[1].startswith("  why: ")
        assert lines[2].startswith("  do:  ")


def _subclasses(kind: type[errors.CutawayError]) -> set[type[errors.CutawayError]]:
    return {kind}.union(*map(_subclasses, kind.__subclasses__()))


def test_every_error_of_ours_says_what_why_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in _subclasses(errors.CutawayError):

        def fail(kind: type[errors.CutawayError] = kind) -> None:
            raise kind("does not fit", path="/some/file", field="f", expected=1, got=2, hint="try that")

        assert guarded(fail, []) == kind.exit_code
        assert capsys.readouterr().err.splitlines() == [
            "error: /some/file: f: does not fit",
            "  why: expected 1, got 2",
            "  do:  try that",
        ]
        assert guarded(fail, ["--json"]) == kind.exit_code
        said = json.loads(capsys.readouterr().err)["error"]
        assert said == {
            "code": kind.code,
            "message": "/some/file: f: does not fit (expected 1, got 2)",
            "path": "/some/file",
            "field": "f",
            "hint": "try that",
        }


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise errors.FormatError("odd")

    guarded(fail, ["--debug"])
    assert "Traceback" in capsys.readouterr().err
    guarded(fail, ["--", "--debug"])  # there it is text, not a flag
    assert "Traceback" not in capsys.readouterr().err


def test_warnings_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    def warn() -> None:
        warnings.warn("something\nodd", stacklevel=1)

    assert guarded(warn, []) == 0
    assert capsys.readouterr().err == "warning: something odd\n"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("256", 256),
        ("4k", 4000),
        ("32K", 32_000),
        ("1.5M", 1_500_000),
        ("2GiB", 2**31),
        ("2Gi", 2**31),
        ("1kb", 1000),
        ("3 MiB", 3 * 2**20),
        ("7b", 7 * 10**9),
        ("1_000", 1000),
    ],
)
def test_numbers_people_write(text: str, number: int) -> None:
    assert Count().convert(text, None, None) == number


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "4kk", "1e3", "nan", "1/2", "٣", "9" * 30])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Count().convert(text, None, None)


def test_devices() -> None:
    assert Device().convert("auto", None, None) is None
    assert Device().convert("cuda:1", None, None) == "cuda:1"
    for wrong in ("gpu", "cuda:", "cuda:-1", "cpu:0", ""):
        with pytest.raises(click.BadParameter):
            Device().convert(wrong, None, None)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("run hi --max_new_tokens 5", "--max-tokens"),
        ("run hi --max-new-tokens=5", "--max-tokens"),
        ("run hi --max_tokens 5", "--max-tokens"),
        ("run hi --Top_P 1", "--top-p"),
        ("run hi --temp 0", "--temperature"),
        ("run hi --n-predict 3", "--max-tokens"),
        ("run hi --repeat-penalty 1.1", "--repetition-penalty"),
        ("chat hi --system_prompt x", "--system"),
        ("show --tapps", "--taps"),
        ("models --qiet", "--quiet"),
        ("run hi --prompt x", None),
        ("run hi --zzz", None),
        ("next hi --n-predict 3", None),
    ],
)
def test_a_misspelt_option_gets_a_guess(call: Callable[..., Any], wrong: str, right: str | None) -> None:
    done = call(*wrong.split())
    assert (done.code, done.out) == (2, "")
    what, why, do = done.err.splitlines()
    assert "no such option" in what
    assert "usage: cutaway" in why
    assert do == f"  do:  did you mean {right}?" if right else "did you mean" not in done.err
    assert right is None or call(*wrong.split(), "--json").error["hint"] == f"did you mean {right}?"


SAMPLING = {
    "temperature": (-1, -1e-9, 0, 1, 1e300, float("nan"), float("inf"), -float("inf"), 1e999, "x", ""),
    "top_p": (-0.1, 0, 0.5, 1, 1.0001, float("nan"), float("inf"), "1,5"),
    "min_p": (-0.1, 0, 0.5, 1, 1.0001, float("nan")),
    "repetition_penalty": (-1, 0, 1e-7, 1e-6, 1, 1e9, float("inf"), float("nan")),
    "seed": (-(2**63) - 1, -(2**63), -1, 0, 2**63 - 1, 2**63, 1.5, "1e9", "x"),
    "top_k": (-1, 0, 1, 10**6, 1.5, "x"),
    "max_tokens": (-1, 0, 1, 10**6, 1.5, "x"),
    "stop": ("", "x", " "),
    "bad_words": ("", "x", " "),
    "no_repeat_ngram_size": (-1, 0, 3, 1.5, "x"),
    "min_tokens": (-1, 0, 7, 1.5, "x"),
    "num_beams": (-1, 0, 1, 2, 1024, 1025, 1.5, "x", ""),
    "length_penalty": (-51, -50, 0, 0.5, 50, 50.1, float("nan"), float("inf"), "x"),
    "early_stopping": (True, False, "never", "always", "", 1),
    "answers": (-1, 0, 1, 1024, 1025, 1.5, "x"),
}
SEARCH = ("num_beams", "length_penalty", "early_stopping", "answers")  # of run alone


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SAMPLING.items() for value in values])
def test_what_the_model_would_refuse_is_refused_before_it_is_loaded(
    call: Callable[..., Any], name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two places check: they agree."""
    from cutaway.generation.params import resolve
    from cutaway.spec import GenerationSettings

    def stop(*_: object, **__: object) -> None:
        raise errors.OfflineError("it came as far as loading")

    for verb in ("run", "chat", "next"):
        monkeypatch.setattr(f"cutaway.cli.{verb}.load_model", stop)
    argument = "n" if name == "answers" else name
    try:
        resolve(GenerationSettings(), 100, **{argument: value})  # type: ignore[arg-type]
        taken = True
    except errors.RequestError:
        taken = False
    for verb in ("run",) if name in SEARCH else ("run", "chat"):
        done = call(verb, "hi", f"--{name.replace('_', '-')}={value}", "--json")
        assert done.code == (5 if taken else 2)
        assert done.error["field"] == (None if taken else argument)
    if name == "temperature":
        assert call("next", "hi", f"--temperature={value}").code == (5 if taken else 2)
