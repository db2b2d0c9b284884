"""Only `families/` knows a family by name: elsewhere code asks for what a spec says, never whose model it is.

The names are read from the registry, so a new family is watched from its first day. Identifiers, string literals and
file names count; docstrings and comments do not, for an example there decides nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cutaway
from cutaway.families import family_of, known_families
from cutaway.families.registry import _GGUF

SRC = Path(cutaway.__file__).parent
FILES = [path for path in sorted(SRC.rglob("*.py")) if path.relative_to(SRC).parts[0] != "families"]

# Where a family's name is lawful: file, the whole identifier or literal (a regular expression), why.
# A line that nothing needs any more fails, so the table only ever says what is there.
LAWFUL = (
    ("checkpoints/catalog.py", ".*", "the catalogue of downloadable models: what they are called, and by whom"),
    ("cli/common.py", "smollm2", "the catalogue's default entry, by its name"),
    ("cli/options.py", r".*\[smollm2\]", "the same, in --model's help"),
    ("store.py", "smollm2", "the same, as load's default"),
    ("tokenizers/pretokenizers.py", ".*", "GGUF's table of pre-tokenizer names (tokenizer.ggml.pre), and its patterns"),
    ("tokenizers/gguf.py", "gpt2|llama|gpt2 or llama", "GGUF's two kinds of vocabulary (tokenizer.ggml.model)"),
    ("tokenizers/gguf_write.py", "gpt2|llama", "the same, written"),
    ("tokenizers/check.py", "Bert[A-Z].*", "components of the tokenizers library, by their class names"),
    ("tokenizers/vocab_files.py", "BertNormalizer|BertPreTokenizer", "the same"),
    ("tokenizers/legacy.py", ".*", "a table of tokenizer classes (tokenizer_class): old folders say nothing else"),
    ("tokenizers/spm_tree.py", "t5_tree", "one of those classes' pipelines"),
    ("tokenizers/marian.py", ".*", "another's, a folder of two SentencePiece models, known by its files"),
    ("tokenizers/load.py", "from_marian|cutaway.tokenizers.marian", "the same, where it is tried"),
    ("checkpoints/sentence.py", "sentence_bert_config.json", "a file of sentence-transformers, by its name"),
    ("checkpoints/hub.py", "sentence_bert_config.json", "the same"),
    ("cli/fill.py", "a masked language model, such as google-bert/bert-base-uncased", "an example in a message"),
    ("spec/recipe_positions.py", "_?t5", "the recipe's word for a table of biases by distance, after the paper"),
    ("spec/__init__.py", "Llama3Scaling", "a rotary scaling that has no other name (rope_type: llama3); many use it"),
    ("spec/position.py", "Llama3Scaling", "the same"),
    ("spec/check.py", "Llama3Scaling|llama3", "the same"),
    ("modules/rotary.py", "Llama3Scaling|_llama3", "the same"),
    ("checkpoints/gguf_save.py", "Llama3Scaling", "the same, which GGUF stores as factors"),
    ("models/init.py", "(N|zero|the same).*(code|state it too).*", "whose code a way of starting is taken from"),
    ("formats/config.py", "is_llama_config", "a key of other people's configs that changes nothing"),
)
ORDINARY = {"text", "moe"}  # parts of a model_type that name no family
PROGRAM = re.compile(r"llama[._]cpp", re.I)


def _words() -> set[str]:
    """What the registry's families are called: `gpt_neox` and `GPTNeoXForCausalLM` give gpt, neox, gptneox."""
    heads = [re.sub("(ForCausalLM|LMHeadModel)$", "", family_of(name).architecture) for name in known_families()]
    names = [*known_families(), *_GGUF, *heads]
    parts = {part for name in names for part in re.findall("[a-z]+", name.lower())} - ORDINARY
    return {part for part in parts if len(part) > 2} | {name.lower() for name in names if name}  # a body has no head


def _pattern(words: set[str]) -> re.Pattern[str]:
    """A long word counts wherever it stands. A short one, in whole words of snake_case, CamelCase and CAPITALS only."""
    found = []
    for word in sorted(words, key=lambda word: (-len(word), word)):
        one = re.escape(word)
        short = rf"(?<![A-Za-z]){one}(?![a-z])|{one.capitalize()}(?![a-z])|(?<![A-Z]){one.upper()}(?![a-z])"
        found.append(short if len(word) < 5 else f"(?i:{one})")
    return re.compile("|".join(found))


NAMED = _pattern(_words())


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and string literal of a file, docstrings left out."""
    tree = ast.parse(source)
    parents = [(node, child) for node in ast.walk(tree) for child in ast.iter_child_nodes(node)]
    lines = {tree: 1}
    for parent, node in parents:
        lines.setdefault(node, getattr(node, "lineno", lines[parent]))
    alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # a literal that is a statement
    for node, line in lines.items():
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                text = text.decode("latin-1") if isinstance(text, bytes) else text
                if isinstance(text, str) and not (isinstance(node, ast.Constant) and node in alone):
                    yield line, text


def named(source: str) -> list[tuple[int, str]]:
    """The texts of a file that name a family."""
    return [(line, text) for line, text in texts(source) if NAMED.search(PROGRAM.sub("", text))]


def _lawful(path: str, text: str) -> list[int]:
    """The lines of the table that let this pass."""
    return [i for i, (file, only, _) in enumerate(LAWFUL) if file == path and re.fullmatch(only, text, re.DOTALL)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_no_family_is_named(path: Path) -> None:
    where = str(path.relative_to(SRC))
    assert not NAMED.search(where) or _lawful(where, where), (
        f"{where}: a file named after a family belongs into families/"
    )
    found = [f"{where}:{line} {text!r}" for line, text in named(path.read_text()) if not _lawful(where, text)]
    assert not found, "say what the spec says, not whose model it is: " + "; ".join(found)


def test_every_exception_is_needed() -> None:
    used = set()
    for path in FILES:
        where = str(path.relative_to(SRC))
        used |= {i for _, text in named(path.read_text()) for i in _lawful(where, text)}
    assert not [LAWFUL[i] for i in range(len(LAWFUL)) if i not in used]


@pytest.mark.parametrize("name", known_families())
def test_every_family_is_seen(name: str) -> None:
    """Each way in which code could ask for a family is found, and on its line."""
    architecture = family_of(name).architecture or f"{name.capitalize()}Model"
    asked = (
        f'if spec.family == "{name}":',
        f'if config["architectures"] == ["{architecture}"]:',
        f"if spec.family in {{'none', '{name.upper()}'}}:",
        f'if key.startswith(f"{{at}}.{name}."):',
        f"if isinstance(spec, {architecture.removesuffix('ForCausalLM')}Spec):",
        f"if is_{name}(spec):",
        f"if b'{name}' in data:",
        f"if build({name}=True):",
    )
    for line in asked:
        assert {found for found, _ in named(f"x = 1\n{line}\n    x = 2\n")} == {2}, line
    for statement in (
        f"from cutaway.families.{name} import read",
        f"import cutaway.families.{name} as other",
        f"def _{name}(x): ...",
        f"class {architecture}: ...",
        f"match x:\n    case '{name}':\n        pass",
        f"TABLE = {{'{name}': 1}}",
        f"x: '{name}' = 1",
    ):
        assert named(statement), statement


def test_other_words_are_not_names() -> None:
    source = '''
"""Docstrings may say llama."""
# Comments too: gemma.
class Prompt:
    """As Falcon does."""

    attempt: int  # of GPT-2
    "What follows a field: BLOOM's."

    def encode_prompt(self, Prompt, PROMPT2="prompt/", moe=True, text=None, philox=1):
        """Qwen."""
        raise ValueError("convert it with today's llama.cpp", "a graph", "an empty prompt", "llama_cpp")
'''
    assert named(source) == []
