r"""What GGUF's ``tokenizer.ggml.pre`` names mean: how a byte-level BPE text is cut before merging.

The names and the order of the splits are llama.cpp's (src/llama-vocab.cpp). Where it had to
rewrite a model's own pattern for its regex engine, the original stands here, as this engine
reads it: ``(?i:'s)`` also folds the long s, and ``\p{Lu}`` is more than A to Z.
Each pattern of a name cuts the pieces that the patterns before it left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutaway.errors import TokenizerError
from tokenizers import Regex, normalizers, pre_tokenizers

__all__ = ["PreTokenizer", "pre_tokenizer_name", "pre_tokenizer_named"]


@dataclass(frozen=True)
class PreTokenizer:
    """One name's rule. ``whole``: a piece that is in the vocabulary is that token, without merging."""

    patterns: tuple[str, ...]
    whole: bool = False
    adds_bos: bool = False
    nfc: bool = False

    def build(self) -> Any:
        """The library's pipeline."""
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> Any:
        return normalizers.NFC() if self.nfc else None


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str = r"\p{N}", contraction: str = _CONTRACTION, marks: str = rf"{_MARKS}[\r\n]*") -> str:
    return "|".join((contraction, _WORD, digits, marks, _SPACES))


def _camel(digits: str, ending: str = "") -> str:
    """Words end where a capital follows a small letter."""
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}{ending}" for a, b in (("*", "+"), ("+", "*")))
    return "|".join((*words, digits, rf"{_MARKS}[\r\n/]*", _SPACES))


_THREE = r"\p{N}{1,3}"
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
# DeepSeek's "letters": the cased ones, of an older Unicode and without these scripts.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C88\u2CF2\u2CF3\u2D00-\u2D2D"
    r"\uA790-\uA7FA\uAB30-\uAB68\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DFFF}]]"
)
_CJK = "[一-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    _THREE,
    "[一-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)

_RULES: dict[str, PreTokenizer] = {
    "default gpt-neox": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 gpt2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 "
    "mellum modern-bert exaone4 jais trillion granite-docling": PreTokenizer((_GPT2,)),
    # These come from GPT-NeoX's tokenizer, whose own file normalizes to NFC; so does Qwen's.
    "mpt olmo": PreTokenizer((_GPT2,), nfc=True),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": PreTokenizer(
        (_cl100k(_THREE),), whole=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": PreTokenizer((_cl100k(_THREE),)),
    "qwen2": PreTokenizer((_cl100k(),), nfc=True),
    "deepseek-r1-qwen stablelm2 hunyuan megrez solar-open kormo f2llmv2 grok-2": PreTokenizer((_cl100k(),)),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        nfc=True,
    ),
    "minicpm5": PreTokenizer((_THREE, _cl100k(r"\p{N}+")), whole=True),
    "seed-coder": PreTokenizer((_cl100k(marks=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_camel(_THREE, f"{_CONTRACTION}?"),)),
    "tekken": PreTokenizer((_camel(r"\p{N}"),), whole=True, adds_bos=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _camel(_THREE, f"{_CONTRACTION}?"))),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", rf"\s?{_CASED}+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK3),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}

_BY_NAME = {name: rule for names, rule in _RULES.items() for name in names.split()}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """The rule of a ``tokenizer.ggml.pre`` name. TokenizerError lists the known ones."""
    try:
        return _BY_NAME[name]
    except KeyError:
        known = " ".join(sorted(_BY_NAME))
        raise TokenizerError(
            "unknown pre-tokenizer", field="tokenizer.ggml.pre", got=name, hint=f"known: {known}"
        ) from None


def pre_tokenizer_name(normalizer: Any, pre_tokenizer: Any, *, whole: bool) -> str:
    """The inverse of :func:`pre_tokenizer_named`, for the pipeline of any tokenizer.json.

    Args:
        normalizer, pre_tokenizer: as JSON.
        whole: whether a piece that is in the vocabulary is that token without merging (``ignore_merges``).

    Raises:
        TokenizerError: no name means this pipeline.
    """
    nfc = normalizer is not None and normalizer.get("type") == "NFC"
    patterns = _patterns(pre_tokenizer)
    plain = patterns is not None and (nfc or normalizer is None)
    for names, rule in _RULES.items():
        if plain and (rule.patterns, rule.whole, rule.nfc) == (patterns, whole, nfc):
            return names.split()[0]
    raise TokenizerError(
        "GGUF has no name for this way of cutting a text",
        field="/pre_tokenizer",
        expected="the pipeline of a tokenizer that llama.cpp knows",
        got={"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "ignore_merges": whole},
    )


def _patterns(tree: Any) -> tuple[str, ...] | None:
    """The patterns that a pipeline splits by, one after the other, before its bytes; None for any other pipeline."""
    steps = tree.get("pretokenizers", [tree]) if isinstance(tree, dict) else []
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    found: list[str] = []
    for step in steps[:-1]:
        regex = step.get("pattern", {}).get("Regex") if isinstance(step.get("pattern"), dict) else None
        # What matches is kept and the rest removed: the same, as these patterns match everything.
        ways = (("Isolated", False), ("Removed", True))
        if step["type"] == "Digits":
            found.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif step["type"] == "Split" and regex and (step.get("behavior"), step.get("invert", False)) in ways:
            found.append(regex)
        else:
            return None
    return (*found, _GPT2) if steps[-1].get("use_regex", True) else tuple(found)
