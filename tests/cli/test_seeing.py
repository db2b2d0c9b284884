"""Verbs that look inside: what they print is the library's, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cutaway
from cutaway import edits
from cutaway.cli.text import width
from tests.cli.test_encoders import Zoo, zoo  # noqa: F401 (a fixture)

Call = Callable[..., Any]
TEXT = "the end"


def test_json_is_the_result(call: Call, folder: Path) -> None:
    inside = cutaway.load(folder).inside
    wanted = {
        ("lens", TEXT): inside.lens(TEXT, positions=[-1]),
        ("lens", TEXT, "--all", "--follow", "e"): inside.lens(TEXT, follow="e"),
        ("attn", TEXT, "--layer", 1, "--head", 2): inside.attention(TEXT, 1, 2),
        ("heads", TEXT): inside.head_scores(TEXT),
        ("heads", "--copying"): inside.copying_scores(),
        ("heads", TEXT, "--ablate"): inside.ablation_sweep(TEXT),
        ("neurons", TEXT, "--top", 3): inside.neurons(TEXT, k=3),
        ("neighbors", " the"): inside.neighbours(" the"),
        ("neighbors", " the", "--by", "dot"): inside.neighbours(" the", by="dot"),
        ("neighbors", " the", "e", "a"): inside.analogy(" the", "e", "a"),
        ("attribute", TEXT): inside.decompose(TEXT),
        ("attribute", TEXT, "--of", "e", "--contrast", "a"): inside.decompose(TEXT, ("e", "a")),
        ("attribute", TEXT, "--method", "grad"): inside.saliency(TEXT),
        ("attribute", TEXT, "--method", "ig", "--steps", 4): inside.integrated_gradients(TEXT, steps=4),
        ("attribute", TEXT, "--method", "occlusion", "--of", "e"): inside.occlusion(TEXT, "e"),
        ("patch", TEXT, "--zero", "L1.H2"): inside.effect(TEXT, {"decoder.layers.1.attn.z": edits.zero(heads=2)}),
        ("patch", TEXT, "--scale", "L1.mlp=0.5"): inside.effect(TEXT, {"decoder.layers.1.mlp.out": edits.scale(0.5)}),
        ("patch", TEXT, "--from", "the bnd", "--word", "e"): inside.patch_sweep("the bnd", TEXT, "e"),
        ("patch", TEXT, "--from", "the", "--word", "e", "--align", "end"): inside.patch_sweep(
            "the", TEXT, "e", align="end"
        ),
    }
    for line, result in wanted.items():
        done = call(*line, "-m", folder, "--json")
        assert done.code == 0, done.err
        found = done.json
        assert {key: found[key] for key in result.as_dict()} == result.as_dict(), line


@pytest.mark.parametrize(
    "line",
    [
        ("lens", TEXT),
        ("lens", TEXT, "--all"),
        ("attn", TEXT, "--layer", 0),
        ("heads",),
        ("neurons", TEXT),
        ("neighbors", " the"),
        ("attribute", TEXT),
        ("patch", TEXT, "--zero", "L1.H2", "--scale", "L1.H2=2"),
        ("patch", TEXT, "--from", "the bnd", "--at", "L1", "--token", 2),
        ("patch", TEXT, "--from", "the bnd", "--over", "head", "--word", "e"),
        ("trace", TEXT),
    ],
)
def test_drawn(call: Call, folder: Path, line: tuple[Any, ...], tmp_path: Path) -> None:
    """Within 80 columns, with what it is worth; and the same as a page."""
    done = call(*line, "-m", folder)
    assert done.code == 0, done.err
    assert all(width(text) <= 80 for text in done.out.splitlines())
    assert "model's own" in " ".join(done.out.split())
    assert "\x1b" not in done.out
    assert all(word in done.out for word in ("·", "\n"))
    if line[0] in ("attn", "heads"):
        assert "no explanation" in " ".join(done.out.split())
    if line[0] != "trace":
        assert call(*line, "-m", folder, "-o", tmp_path / "x.html").code == 0
        assert "<table" in (tmp_path / "x.html").read_text()


def test_one_option_is_one_option(call: Call) -> None:
    """Where two verbs that look inside have an option of one name, it is the same one, with the same words."""
    from cutaway.cli import attn, attribute, heads, lens, neurons, patch

    own = {"--layer", "--top", "--at", "--token"}  # of another meaning, or another number, in some
    seen: dict[str, set[tuple[Any, ...]]] = {}
    for verb in (attn, attribute, heads, lens, neurons, patch):
        for option in verb.command.params:
            facts = (option.type.name, getattr(option, "help", None), getattr(option, "multiple", False))
            seen.setdefault(option.opts[0], set()).add(facts)
    assert {name for name, facts in seen.items() if len(facts) > 1} <= own
    pair = [{o.opts[0]: o for o in verb.command.params} for verb in (attribute, neurons)]
    assert all(pair[0][name].help == pair[1][name].help for name in ("--of", "--contrast", "--token", "--target"))


def test_colour_on_a_terminal(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" in call("attn", TEXT, "--layer", 0, "-m", folder, stdout_tty=True).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in call("attn", TEXT, "--layer", 0, "-m", folder, stdout_tty=True).out


def test_a_trace_is_a_file(call: Call, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.cut"
    done = call("trace", TEXT, "-m", folder, "-n", 2, "--layers", "1-2", "--keep", "*.attn.z", "-o", path)
    assert done.code == 0, done.err
    kept = cutaway.Trace.open(path)
    model = cutaway.load(folder)
    again = model.trace(TEXT, "decoder.layers.1.attn.z", "decoder.layers.2.attn.z", max_tokens=2)
    assert {*kept} == {*again}
    assert kept.tokens == again.tokens
    assert all((kept[name] == again[name]).all() for name in kept)
    for line in (("trace", path), ("show", path)):
        shown = call(*line)
        assert shown.code == 0, shown.err
        assert "decoder.layers.2.attn.z" in shown.out
        assert call(*line, "--json").json["tokens"] == kept.tokens
    path.write_bytes(b"nothing")
    assert call("trace", path).code == 3
    assert call("trace", tmp_path / "no.cut").code in (3, 4)


def test_compare(call: Call, folder: Path, base_folder: Path) -> None:
    same = call("compare", folder, folder, "--prompt", TEXT, "--dtype2", "fp32", "--json").json
    assert same["first"] is None
    other = call("compare", folder, "--prompt", TEXT, "--prompt2", "the bnd", "--json").json
    assert other["first"]["name"] == "embed.tokens"
    rounded = call("compare", folder, "--prompt", TEXT, "--dtype2", "bf16", "--tolerance", 1e-6, "--json").json
    assert rounded["first"] is not None
    assert call("compare", folder, base_folder, "--prompt", TEXT).code == 0


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (("lens", TEXT, "--follow", "end"), 3, "'e' + 'n' + 'd'"),
        (("lens", TEXT, "--all", "--token", "1"), 2, "--all"),
        (("attn", TEXT), 3, "--layer"),
        (("attn", TEXT, "--layer", "9"), 3, "no branch"),
        (("attn", TEXT, "--layer", "0", "--head", "9"), 3, "no such head"),
        (("attn", "", "--layer", "0"), 3, "nothing to look at"),
        (("trace", ""), 3, "nothing to look at"),
        (("neighbors", "a", "b"), 2, "three"),
        (("attribute", TEXT, "--method", "grad", "--steps", "3"), 2, "no such option"),
        (("patch", TEXT), 2, "what is changed"),
        (("patch", TEXT, "--zero", "L99.H0"), 3, "decoder.layers.99"),
        (("patch", TEXT, "--zero", "L0.H99"), 3, "heads"),
        (("patch", TEXT, "--scale", "L0.mlp"), 3, "L7.mlp=0"),
        (("patch", TEXT, "--from", "the"), 3, "as many tokens"),
        (("trace", TEXT, "--keep", "nothing"), 3, "nothing"),
        (("trace", TEXT, "--layers", "x"), 2, "layers"),
        (("trace", TEXT, "-o", "x.txt"), 2, ".cut"),
        (("compare",), 2, "model"),
    ],
)
def test_refusals(call: Call, folder: Path, line: tuple[str, ...], code: int, says: str) -> None:
    done = call(*line, *(() if line[0] == "compare" else ("-m", folder)))
    assert done.code == code, done.err
    assert says in done.err
    assert "Traceback" not in done.err


def test_other_kinds_of_model(call: Call, zoo: Zoo) -> None:  # noqa: F811
    assert call("lens", "the [MASK] cat", "-m", zoo("mlm"), "--json").json["positions"] == [2]
    assert call("attribute", "the cat", "-m", zoo("labels"), "--method", "grad", "--of", "shipping").code == 0
    assert call("lens", "the cat", "-m", zoo("bare")).code == 3
    t5 = zoo("t5")
    found = call("attn", "the end", "-m", t5, "--layer", 0, "--branch", "cross", "--json").json
    assert "".join(found["keys"]) == "the end"
    assert call("patch", "the end", "-m", t5, "--from", "the bnd", "--stack", "encoder", "--word", "a").code == 0
    assert call("patch", "the end", "-m", t5, "--zero", "encoder.L0.H1").code == 0
    assert call("heads", "the end", "-m", t5, "--target", "ab").code == 0
