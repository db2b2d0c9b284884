"""Recipes from YAML: numbers as people write them, and errors that say where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import cutaway
from cutaway.checkpoints.recipe import read_recipe
from cutaway.errors import ConfigError, LimitExceeded, RequestError, StorageError

LEAST = "d_model: 16\nn_heads: 2\nlayers: 2\nvocab_size: 32\n"


def test_text_file_and_words_are_one(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(LEAST)
    words = {"d_model": 16, "n_heads": 2, "layers": 2, "vocab_size": 32}
    sources = (
        LEAST,
        tmp_path / "m.yaml",
        str(tmp_path / "m.yaml"),
        words,
        "{d_model: 16, n_heads: 2, layers: 2, vocab_size: 32}",
    )
    specs = {cutaway.build(source).spec for source in sources}  # type: ignore[arg-type]
    assert len(specs) == 1
    assert cutaway.build(specs.pop()).spec.d_model == 16


def test_numbers() -> None:
    """YAML 1.1 takes 1e-5 for a word."""
    found = read_recipe("a: 1e-5\nb: 1.5E+3\nc: -.5\nd: 10\ne: 1e5x\nf: yes\ng: ~\nh: '1e-5'")
    assert found == {"a": 1e-5, "b": 1500.0, "c": -0.5, "d": 10, "e": "1e5x", "f": True, "g": None, "h": "1e-5"}
    assert cutaway.build(LEAST + "norm: {eps: 1e-6}").spec.decoder.norm.eps == 1e-6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("a: [1, 2\nb: 3", "line 2"),
        ("a: 1\nb: 2\na: 3\n", "line 3"),
        ("a: {b: 1, b: 2}\n", "line 1"),
        ("a: !!python/object/apply:os.system ['true']\n", "line 1"),
        ("a: *nobody\n", "line 1"),
        ("- a\n- b: 1\n", None),
        ("\n", None),
        ("a: \x07\n", None),
        ("a: " + "[" * 5000 + "\n", None),
        ("a: 0x" + "f" * 10 + "\n? [b]\n: 1\n", "line 2"),
    ],
)
def test_what_is_no_recipe(text: str, field: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        read_recipe(text)
    assert caught.value.field == field


def test_files(tmp_path: Path) -> None:
    for place in (tmp_path / "none.yaml", "a\0b"):
        with pytest.raises(StorageError):
            read_recipe(place)
    (tmp_path / "latin.yaml").write_bytes("a: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="UTF-8"):
        read_recipe(tmp_path / "latin.yaml")
    (tmp_path / "large.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(LimitExceeded):
        read_recipe(tmp_path / "large.yaml")


def test_errors_name_the_word() -> None:
    with pytest.raises(ConfigError) as caught:
        cutaway.build(LEAST + "positons: alibi")
    assert (caught.value.field, caught.value.hint) == ("/positons", "Did you mean 'positions'?")


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(RequestError, match="PyYAML") as caught:
        cutaway.build(LEAST)
    assert "pip install pyyaml" in (caught.value.hint or "")
    assert cutaway.build({"d_model": 16, "n_heads": 2, "layers": 2, "vocab_size": 32}).spec.d_model == 16
