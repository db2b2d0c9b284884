"""What each ``tokenizer.ggml.pre`` name cuts."""

from __future__ import annotations

import pytest

from cutaway.tokenizers.pretokenizers import _BY_NAME, pre_tokenizer_named
from tests.tokenizers.texts import random_texts
from tokenizers import Regex, pre_tokenizers


def pieces(rule: object, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in rule.pre_tokenize_str(text)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_every_name_keeps_the_text(name: str):
    rule = pre_tokenizer_named(name).build()
    for text in random_texts(200, seed=11):
        assert "".join(pieces(rule, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("gpt-2", "don't 123  x\n\ny", ["don", "'t", " 123", " ", " x", "\n", "\n", "y"]),
        ("smollm", "a 12 b", ["a", " ", "1", "2", " b"]),
        ("llama-bpe", "12345 DON'T\n\nx", ["123", "45", " DON", "'T", "\n\n", "x"]),
        ("qwen2", "123 I'll!\n", ["1", "2", "3", " I", "'ll", "!\n"]),
        ("gpt-4o", "HTTPServer don't/\n", ["HTTPServer", " don't", "/\n"]),
        ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]),
        ("default", "a+=12345", ["a", "+=", "123", "45"]),
        ("falcon", "a+=12345", ["a", "+=", "123", "45"]),
        ("deepseek-llm", "Hi 你好 12a", ["Hi", " ", "你好", " ", "12", "a"]),
        ("deepseek-coder", "a(1) 12", ["a", "(", "1", ")", " ", "1", "2"]),
        ("deepseek-v3", "你好12345(foo", ["你好", "123", "45", "(foo"]),
        ("bloom", "a b, c", ["a", " b", ",", " c"]),
        ("viking", "ab12", ["ab", "1", "2"]),
        ("seed-coder", "a!\n\nb", ["a", "!", "\n\n", "b"]),
    ],
)
def test_cuts(name: str, text: str, want: list[str]):
    assert pieces(pre_tokenizer_named(name).build(), text) == want


def test_smollm_is_the_published_pipeline():
    published = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = pre_tokenizer_named("smollm").build()
    for text in random_texts(2000, seed=12):
        assert pieces(ours, text) == pieces(published, text)


def test_gpt2_is_the_librarys_own():
    published = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ours = pre_tokenizer_named("gpt-2").build()
    for text in random_texts(2000, seed=13):
        assert pieces(ours, text) == pieces(published, text)


def test_o200k_pattern():
    """The published pattern in one piece (tiktoken's o200k_base), against ours from parts."""
    pattern = "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )
    assert pre_tokenizer_named("gpt-4o").patterns == (pattern,)
    assert pieces(pre_tokenizers.Split(Regex(pattern), "isolated"), "aB'll") == ["a", "B'll"]
