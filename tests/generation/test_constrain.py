"""Answers with a form: whatever the model says, they have it; and nobody else's mask, order or batch is disturbed."""

from __future__ import annotations

import gc
import json
import random
import re
import sys
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import torch

import cutaway
import tokenizers
from cutaway.errors import RequestError
from cutaway.generation import token_bytes
from cutaway.generation.constrain import Constraint, Guides, mask
from cutaway.generation.generate import Generation, Run
from cutaway.generation.params import resolve
from cutaway.model import Model
from cutaway.spec import GenerationSettings
from cutaway.tokenizers.load import from_folder
from cutaway.tokenizers.tokenizer import Tokenizer
from tests.generation.schemas import check_schemas
from tests.generation.scripted import Scripted, Spec
from tests.reference import tiny_seq2seq

CORPUS = ['{"name": "value", "list": [1, 2.5, true, false, null]}', "yes no maybe the cat sat on the mat"] * 4


def byte_level(folder: Path) -> Tokenizer:
    """Bytes, a few merges, one end token, one control token."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<end>", "<ctl>"], show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    found = from_folder(folder)
    assert found is not None
    return found


def over(tokenizer: Tokenizer, *, rows: int | None = None, ends: tuple[int, ...] | None = None) -> Model:
    """A tiny random model with that vocabulary, and some rows that nobody names."""
    size = rows or tokenizer.vocab_size + 5
    model = cutaway.build({"d_model": 16, "n_heads": 2, "layers": 1, "vocab_size": size}, seed=1)
    model.tokenizer = tokenizer
    model.settings = GenerationSettings(eos_ids=tokenizer.eos_ids if ends is None else ends)
    with torch.no_grad():
        for parameter in model.transformer.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.25, generator=torch.Generator().manual_seed(3))
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return over(byte_level(tmp_path_factory.mktemp("bytes")))


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Noise(Scripted):
    """Says anything, and quickly: there are two hundred answers to write."""

    def unembed(self, x: torch.Tensor, tap: Any = None) -> torch.Tensor:
        place = int(x.max())
        noise = torch.randn(x.shape[0], self.spec.vocab_size, generator=torch.Generator().manual_seed(place))
        return noise[:, None]


def noise(model: Model, schema: dict[str, Any], seed: int) -> Generation:
    """What noise says in a model's vocabulary."""
    size = model.spec.vocab_size
    says: Any = Noise([0], spec=Spec(vocab_size=size))
    sampling = resolve(model.settings, size, schema=schema, temperature=1.0, seed=seed, max_tokens=400)
    run = Run(says, model.tokenizer, [[3, 4, 5]], sampling)
    for _ in run:
        pass
    return run.results()[0]


def drawn(model: Model, schema: dict[str, Any], seed: int) -> Generation:
    """What the model itself says."""
    found: Generation = model.generate("x", schema=schema, temperature=1.0, seed=seed, max_tokens=300)
    return found


def test_every_finished_answer_is_valid(model: Model) -> None:
    """Must show 5: two hundred schemas, each larger than those before."""
    assert check_schemas(partial(noise, model), 200, 0) > 180


@pytest.mark.real
def test_smollm2(smollm2_path: Path) -> None:
    real = cutaway.load(smollm2_path)
    wants = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer = real.generate("Name a city as JSON.", schema=wants, temperature=0, max_tokens=60)
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.text)["city"], str)
    assert check_schemas(partial(noise, real), 6, 1) >= 4


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_smollm2_two_hundred(smollm2_path: Path) -> None:
    """By noise, whose text is wilder than a model's, and some by the model."""
    real = cutaway.load(smollm2_path)
    assert check_schemas(partial(noise, real), 200, 2) > 150
    assert check_schemas(partial(drawn, real), 15, 3) > 10


@pytest.mark.parametrize("name", ["llama2", "gemma3", "qwen3"])
def test_other_vocabularies(name: str, real_tokenizer: Any) -> None:
    """SentencePiece's spaces and bytes, added tokens, several end tokens."""
    tokenizer = from_folder(real_tokenizer(name))
    assert tokenizer is not None
    model = over(tokenizer)
    assert check_schemas(partial(drawn, model), 6, 2) >= 4
    answer = model.generate("x", choices=[" a cat", "eine Käsefondue 🙂"], temperature=1.0, seed=2)
    assert answer.text in (" a cat", "eine Käsefondue 🙂")


def test_spellings_of_a_schema(model: Model) -> None:
    wants = {"type": "integer", "minimum": 5, "maximum": 70}
    forms: list[Any] = [wants, json.dumps(wants)]
    found = {model.generate("x", schema=form, temperature=0, max_tokens=9).text for form in forms}
    assert len(found) == 1
    anything = {model.generate("x", schema=form, seed=4, max_tokens=40).text for form in (True, {}, "true")}
    assert len(anything) == 1


# ── expressions, choices, grammars ───────────────────────────────────────────────────────────────────────────


def test_expressions(model: Model) -> None:
    for expression in (
        r"[a-c]{3,6}",
        r"\d{1,3}(\.\d{2})?",
        r"(yes|no|maybe)!{1,3}",
        r"🙂[^a]{2}é",
        r"a?b?c?",
        r"\p{L}{2}",
    ):
        for seed in range(4):
            answer = model.generate("x", regex=expression, temperature=1.0, seed=seed, max_tokens=60)
            assert answer.finish_reason == "stop"
            assert re.fullmatch(expression.replace(r"\p{L}", r"[^\W\d_]"), answer.text, re.DOTALL), answer.text


def test_choices(model: Model) -> None:
    words = ["a", "ab", "abc", " a", 'q"\\x', "line\nend", "🙂 é", "[x]*", "\x07#", "A-z&~|"]
    seen = {model.generate("x", choices=words, temperature=8.0, seed=seed, max_tokens=40).text for seed in range(120)}
    assert seen <= set(words)
    assert len(seen) > 6
    for word in words:
        assert model.generate("x", choices=[word], temperature=0).text == word


def test_a_grammar(model: Model) -> None:
    lark = 'start: sum\nsum: NUMBER ("+" NUMBER)~1..3 "="\nNUMBER: /[0-9]{1,2}/'
    for seed in range(5):
        answer = model.generate("x", grammar=lark, temperature=1.0, seed=seed, max_tokens=60)
        assert re.fullmatch(r"\d{1,2}(\+\d{1,2}){1,3}=", answer.text)
        assert answer.finish_reason == "stop"


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ends(model: Model) -> None:
    """Where nothing may follow there is no end token; where something may, one is allowed; before, none is."""
    end = model.settings.eos_ids[0]
    answer = model.generate("x", regex="abc", temperature=0)
    assert (answer.text, answer.finish_reason) == ("abc", "stop")
    assert end not in answer.tokens
    wants_end = {end: 1000.0}
    answer = model.generate("x", regex="b{2,}", temperature=0, logit_bias=wants_end)
    assert (answer.text, answer.tokens[-1]) == ("bb", end)
    answer = model.generate("x", regex="b+", temperature=0, logit_bias={end: -1000.0}, max_tokens=7)
    assert (set(answer.text), answer.finish_reason) == ({"b"}, "length")
    # An id of `stop` that is a letter ends too, so it is no letter of the answer.
    assert model.tokenizer is not None
    (b,) = model.tokenizer.encode("b", continuation=True)
    answer = model.generate("x", regex="a[ab]{0,5}c?", temperature=0, stop=[b], logit_bias={b: 1000.0})
    assert (answer.text, answer.tokens[-1]) == ("a", b)
    without = over(model.tokenizer, ends=())
    assert without.generate("x", regex="ab{0,2}", temperature=0, max_tokens=9).text in ("a", "ab", "abb")


# ── company ──────────────────────────────────────────────────────────────────────────────────────────────────

WANTS = {"type": "array", "items": {"enum": ["x", "yy", 12]}, "minItems": 1, "maxItems": 6}


def same(one: Generation, other: Generation) -> bool:
    return (one.text, one.tokens, one.finish_reason) == (other.text, other.tokens, other.finish_reason)


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.2, "seed": 5}])
@pytest.mark.parametrize("steady", [False, True])
def test_ragged_rows_choices_and_streams(model: Model, how: dict[str, Any], steady: bool) -> None:
    prompts = ["the", "cat sat on the mat", "yes no maybe", "q", "[1, 2]"]
    how = {**how, "schema": WANTS, "max_tokens": 40, "deterministic": steady}
    together = model.generate(prompts, **how)
    for prompt, answer in zip(prompts, together, strict=True):
        assert same(model.generate(prompt, **how), answer)
        stream = model.stream(prompt, **how)
        assert "".join(stream) == answer.text
        assert same(stream.result, answer)
    many = model.generate(prompts, n=3, **how)
    for place in range(len(prompts)):
        assert same(many[3 * place], together[place])
    for answer in many:
        if answer.finish_reason == "stop":
            assert 1 <= len(json.loads(answer.text)) <= 6
    if how["temperature"]:
        assert len({answer.text for answer in many}) > len(prompts)


# ── masks ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_masks_are_llguidances(model: Model) -> None:
    """A random walk beside a matcher over llguidance's own reading of the same vocabulary."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    ends = frozenset(model.settings.eos_ids)
    theirs = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=model.spec.vocab_size, eos_token=sorted(ends))
    schema = {"type": "object", "properties": {"n": {"type": "string", "maxLength": 9}}, "required": ["n"]}
    source, steps = random.Random(0), 0
    for kind, text, form in (
        ("regex", "(the|cat)[a-z \n]{0,20}", llguidance.LLMatcher.grammar_from_regex("(the|cat)[a-z \n]{0,20}")),
        (
            "schema",
            json.dumps(schema | {"x-guidance": {"whitespace_flexible": False}}),
            llguidance.LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False}),
        ),
    ):
        guides = Guides(Constraint(kind, text), tokenizer, model.spec.vocab_size, ends)
        for _ in range(8):
            guide, matcher = guides.new(), llguidance.LLMatcher(theirs, form)
            for _ in range(30):
                mine = guide.allowed(model.spec.vocab_size)
                bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
                assert mine.tolist() == bits[: model.spec.vocab_size].astype(bool).tolist()
                steps += 1
                x = torch.randn(1, model.spec.vocab_size)
                assert torch.equal(mask(x, [guide])[0].isfinite(), mine)
                token = source.choice(mine.nonzero()[:, 0].tolist())
                if guide.take(token):
                    break
                assert matcher.consume_token(token)
    print(f"\n{steps} masks")


def test_the_order_of_steps(model: Model) -> None:
    """A bias cannot bring a forbidden token back; what is forbidden by others stays so; top-k sees the rest only."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    (a,), (z,) = (tokenizer.encode(text, continuation=True) for text in "az")
    assert model.generate("x", regex="[ab]", temperature=0, logit_bias={z: 500.0, a: 100.0}).text == "a"
    assert model.generate("x", regex="[ab]", temperature=0, bad_words=[[a]]).text == "b"
    assert {model.generate("x", regex="[ab]", temperature=1.0, top_k=1, seed=s).text for s in range(5)} <= {"a", "b"}
    with pytest.raises(RequestError, match="leaves no token") as caught:
        model.generate("x", regex="a", temperature=0, bad_words=[[a]])
    assert caught.value.field == "regex"


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────

DEEP: dict[str, Any] = {}
for _ in range(500):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", {"type": "nope"}),
        ("schema", {"not": {}}),
        ("schema", {"x-guidance": {"lenient": True}, "not": {}}),
        ("schema", {"$ref": "http://example.org/x"}),
        ("schema", {"type": "string", "pattern": "("}),
        ("schema", "{"),
        ("schema", '{"type": "string", "type": "null"}'),
        ("schema", "[1]"),
        ("schema", "false"),
        ("schema", ""),
        ("schema", False),
        ("schema", 5),
        ("schema", {"const": float("nan")}),
        ("schema", {"const": object()}),
        ("schema", {"const": "\ud800"}),
        ("schema", DEEP),
        ("schema", {"description": "x" * (1 << 20)}),
        ("regex", "(a"),
        ("regex", "(?=a)b"),
        ("regex", ""),
        ("regex", b"a"),
        ("regex", "\ud800"),
        ("regex", "a" * ((1 << 20) + 1)),
        ("grammar", "start: foo"),
        ("grammar", "begin: 'a'"),
        ("grammar", 7),
        ("choices", []),
        ("choices", "abc"),
        ("choices/1", ["a", ""]),
        ("choices/0", [3]),
        ("choices/0", ["\ud800"]),
        ("choices", ["x" * 70_000] * 20),
    ],
)
def test_refused_before_the_model_runs(model: Model, field: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.transformer), "hidden", None)
    start = time.perf_counter()
    for call in (model.generate, model.stream):
        with pytest.raises(RequestError) as caught:
            call("x", **{field.partition("/")[0]: value})
        assert caught.value.field == field
        assert len(str(caught.value)) < 700
    print(f"\n{1000 * (time.perf_counter() - start):.0f} ms: {caught.value}")


def test_what_does_not_go_together(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, field in (
        ({"regex": "a", "choices": ["a"]}, "regex"),
        ({"regex": "a", "num_beams": 2}, "regex"),
        ({"schema": True, "grammar": "x"}, "schema"),
    ):
        with pytest.raises(RequestError) as caught:
            model.generate("x", **arguments)
        assert caught.value.field == field
    assert model.tokenizer is not None
    bare = over(model.tokenizer)
    bare.tokenizer = None
    with pytest.raises(RequestError, match="tokenizer"):
        bare.generate([3], regex="a")
    searching = over(model.tokenizer)
    searching.settings = replace(model.settings, num_beams=3, forced_bos_id=4, forced_eos_ids=(0,))
    with pytest.raises(RequestError, match="beams"):
        searching.generate("x", regex="a")
    assert searching.generate([3], regex="ab", num_beams=1, max_tokens=1).finish_reason == "length"
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="not installed") as caught:
        model.generate("x", regex="a")
    assert "cutaway[grammar]" in (caught.value.hint or "")


def test_what_must_follow_may_be_long(model: Model) -> None:
    """It is not all cut into tokens anew at every step; past what the lexer bears it is an error with a name."""
    answer = model.generate("x", regex="(a{1000}){20}", temperature=0, max_tokens=20)
    assert (set(answer.text), answer.finish_reason) == ({"a"}, "length")
    with pytest.raises(RequestError, match="cannot") as caught:
        model.generate("x", regex="(a{1000}){1000}", temperature=0, max_tokens=20)
    assert caught.value.field == "regex"


def test_a_vocabulary_is_made_once_and_not_kept(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    model = over(tokenizer)
    model.generate("x", regex="a")
    made = next(iter(token_bytes._MADE[tokenizer].values()))
    model.generate("x", regex="b")
    assert next(iter(token_bytes._MADE[tokenizer].values())) is made
    for stop in range(9):
        model.generate("x", regex="a", stop=[stop])
    assert len(token_bytes._MADE[tokenizer]) <= 4
    gone = weakref.ref(tokenizer)
    del model, tokenizer, made
    gc.collect()
    assert gone() is None


def test_what_an_encoder_decoder_answers(tmp_path: Path) -> None:
    """Nothing is forced but by the form; a first space counts, whatever the tokenizer usually takes off."""
    tokenizer = byte_level(tmp_path)
    size = tokenizer.vocab_size
    values = tiny_seq2seq.config("bart") | {"vocab_size": size}
    model = cutaway.load(tiny_seq2seq.write(values, tmp_path / "m"))
    model.tokenizer = tokenizer
    model.settings = replace(model.settings, eos_ids=tokenizer.eos_ids, forced_bos_id=3, forced_eos_ids=(0,))
    for words in (["a cat", " a dog"], [" x"], ["x"]):
        for answer in model.generate(["the cat", "q"], choices=words, temperature=2.0, seed=1, n=2, num_beams=1):
            assert answer.text in words
            assert answer.finish_reason == "stop"
