"""Forms that somebody means ill with, or that llguidance gets wrong: an error with a name, or bounded work.

What they did before is beside them: some ended the process, by its stack or its memory, and took everybody's along.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from decimal import Decimal
from itertools import product
from typing import Any

import pytest

from cutaway.errors import RequestError, ResourceError
from cutaway.generation import bounds, constrain
from cutaway.generation.constrain import Guides, constraint_of
from cutaway.model import Model
from cutaway.tokenizers.tokenizer import Tokenizer
from tests.generation.test_constrain import byte_level, over

pytestmark = pytest.mark.timeout(60)  # a guard against hanging


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bytes"))


def guides(tokenizer: Tokenizer, **form: Any) -> Guides:
    made = constraint_of(**{"schema": None, "regex": None, "grammar": None, "choices": None, **form})
    assert made is not None
    return Guides(made, tokenizer, tokenizer.vocab_size, frozenset(tokenizer.eos_ids))


def nested(depth: int, make: Callable[[Any], Any]) -> Any:
    made: Any = {"type": "null"}
    for _ in range(depth):
        made = make(made)
    return made


def chain(n: int, make: Callable[[Any], Any], end: Any = None) -> dict[str, Any]:
    """Definitions each of which leads to the next."""
    links = {f"d{i}": make({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{n}": end or {"type": "null"}}}


def within(x: Any) -> Any:
    return {"properties": {"a": x}, "required": ["a"]}


def rules(n: int, rule: str, last: str = '"a"') -> str:
    """Lark of so many rules, ``%`` being the number of the next."""
    lines = [f"start: {rule[0]}0", *(f"{rule[0]}{i}: {rule[1:].replace('%', f'{rule[0]}{i + 1}')}" for i in range(n))]
    return "\n".join([*lines, f"{rule[0]}{n}: {last}"])


GROWS = "start: p::0\n"
REFUSED: dict[str, tuple[str, Any, str]] = {
    # the stack
    "a chain of 7,000 references": ("schema", chain(7000, within), "levels through references"),
    "a chain of 20,000 rules": ("grammar", rules(20_000, "r%"), "rules and brackets"),
    "a chain of 20,000 terminals": ("grammar", rules(20_000, "R%"), "rules and brackets"),
    "20,000 brackets": ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "rules and brackets"),
    "100,000 brackets": ("regex", "(" * 100_000 + "a" + ")" * 100_000, "cannot be used"),
    "arrays in arrays": ("schema", nested(500, lambda x: {"type": "array", "items": x}), "nested too deeply"),
    "the same in a grammar": ("grammar", f"start: %json {json.dumps(chain(7000, within))}", "levels through"),
    # memory
    "fifty patterns at once": ("schema", {"allOf": [{"pattern": f"a{i}"} for i in range(50)]}, "at most 10"),
    "by references": (
        "schema",
        {"$ref": "#/$defs/d0"}
        | {"$defs": {f"d{i}": {"pattern": f"a{i}", "$ref": f"#/$defs/d{i + 1}"} for i in range(50)} | {"d50": {}}},
        "at most 10",
    ),
    "of one property": (
        "schema",
        {"allOf": [{"properties": {"p": {"type": "string", "pattern": f"a{i}"}}} for i in range(50)]},
        "at most 10",
    ),
    "of any property": (
        "schema",
        {"allOf": [{"additionalProperties": {"type": "string", "pattern": f"a{i}"}} for i in range(50)]},
        "at most 10",
    ),
    "in a grammar": ("grammar", "start: A\nA: " + " & ".join(f"/.*a{i}.*/" for i in range(50)), "at most 10"),
    # work
    "repetitions in repetitions": ("grammar", rules(6000, 'R%+ "c"?'), "rules and brackets"),
    "4,000 properties with 4,000 patterns": (
        "schema",
        {
            "allOf": [
                {"properties": {f"p{i}": {"type": "null"} for i in range(4000)}},
                {"patternProperties": {f"^x{i}": {"type": "null"} for i in range(4000)}},
            ]
        },
        "parts that may hold together",
    ),
    "a grammar that doubles": ("grammar", rules(40, "R% %"), "cannot be used"),
    "a schema that doubles": (
        "schema",
        nested(14, lambda x: {"anyOf": [x, {"type": "array", "items": x}]}),
        "too large",
    ),
    # without end, and nothing could stop it
    "a parameter that grows before any text": ("grammar", GROWS + 'p::_: p::incr(_) "x" | "z"', "where no text was"),
    "after what may be nothing": ("grammar", GROWS + 'p::_: b p::incr(_) | "z"\nb: "" | "x"', "where no text was"),
    "after a terminal that may be": ("grammar", GROWS + 'p::_: A p::set_bit(0) | "z"\nA: /x?/', "where no text was"),
    "after no text": ("grammar", GROWS + 'p::_: "" p :: incr(_) | "" p::incr (_) | "z"', "where no text was"),
    "after a text that may be left out": ("grammar", GROWS + 'p::_: "a"? p::incr(_) | "z"', "where no text was"),
    "10,000 properties": ("schema", {"properties": {f"p{i}": {} for i in range(10_000)}}, "for one object"),
    "10,000 that must be there": ("schema", {"required": [f"p{i}" for i in range(10_000)]}, "for one object"),
    # impossible
    "less than the least": ("schema", {"type": "integer", "minimum": 5, "maximum": 4}, "Unsatisfiable"),
    "nothing between": ("schema", {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 5}, "Unsatisfiable"),
    "shorter than the shortest": ("schema", {"type": "string", "minLength": 5, "maxLength": 4}, "Unsatisfiable"),
    "fewer than the fewest": ("schema", {"type": "array", "minItems": 5, "maxItems": 4}, "Unsatisfiable"),
    "none of nothing": ("schema", {"enum": []}, "Unsatisfiable"),
    "all and none": ("schema", {"type": "object", "properties": {"a": False}, "required": ["a"]}, "Unsatisfiable"),
    "two types": ("schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    "itself": ("schema", {"$ref": "#"}, "no text has this form"),
    "itself or itself": ("schema", {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "no text has this form"),
    "each other": ("schema", chain(1, lambda x: x, {"$ref": "#/$defs/d0"}), "no text has this form"),
    "a rule of itself": ("grammar", "start: start", "no text has this form"),
    "no character": ("regex", r"a[^\x00-\x{10ffff}]b", "no text has this form"),
    # unknown or unsupported
    "not": ("schema", {"not": {"type": "string"}}, "Unimplemented"),
    "unique": ("schema", {"type": "array", "uniqueItems": True}, "Unimplemented"),
    "an unknown format": ("schema", {"type": "string", "format": "spaceship"}, "Unknown format"),
    "a file": ("schema", {"$ref": "file:///etc/passwd"}, "cannot be used"),
    "looking ahead": ("regex", "(?!a)b", "cannot be used"),
    "looking back in a schema": ("schema", {"type": "string", "pattern": r"(a)\1"}, "cannot be used"),
    "half an escape": ("regex", "ab\\", "half an escape"),  # was read without it
    "half of one in a schema": ("schema", {"type": "string", "pattern": "ab\\"}, "half an escape"),
    "half of one in a name": ("schema", {"patternProperties": {"ab\\": {}}}, "half an escape"),
    "a place with 5,000 digits": ("schema", {"allOf": [{"$ref": "#/allOf/" + "9" * 5000}]}, "cannot be used"),
    # what would be no JSON
    "white space that is none": ("schema", {"x-guidance": {"whitespace_pattern": "x*"}}, "no JSON"),
    "white space of Unicode": ("schema", {"x-guidance": {"whitespace_pattern": r"\s*"}}, "no JSON"),
    "anything but": ("schema", {"x-guidance": {"whitespace_pattern": "[^x]"}}, "no JSON"),
    "items apart by nothing": ("schema", {"x-guidance": {"item_separator": " "}}, "no JSON"),
    "names and values apart by =": ("schema", {"x-guidance": {"key_separator": "="}}, "no JSON"),
    "a form in llguidance's own JSON": ("grammar", '{"grammars": [{"json_schema": {}}]}', "no Lark"),
    "broken JSON in a grammar": ("grammar", 'start: %json {"a": ', "no JSON"),
    # numbers, all of which were written as others, or let others in
    "a least past 2^63": ("schema", {"type": "integer", "minimum": 10**19, "maximum": 10**20}, "exactly"),
    "a bound past 2^53": ("schema", {"type": "integer", "minimum": 2**53, "maximum": 2**53 + 3}, "exactly"),
    "a constant past 2^53": ("schema", {"const": 12345678901234567890}, "exactly"),
    "one in a list": ("schema", {"enum": [1, {"a": [2**60 + 1]}]}, "exactly"),
    "0 excluded": ("schema", {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "this short"),
    "-10 excluded": ("schema", {"type": "number", "minimum": -10.5, "exclusiveMaximum": -10}, "this short"),
    "in two parts": ("schema", {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, "this short"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tokenizer: Tokenizer) -> None:
    """Before a model has read anything, and in a few words."""
    field, value, words = REFUSED[name]
    with pytest.raises(RequestError, match=words) as caught:
        guides(tokenizer, **{field: value})
    assert caught.value.field == field
    assert len(str(caught.value)) < 700


BORNE: dict[str, tuple[str, Any]] = {
    "a chain of 3,900 references": ("schema", chain(3900, within)),
    "one of 900 rules": ("grammar", rules(900, 'r"b" | % "c"')),
    "one of 900 terminals": ("grammar", rules(900, 'R"x" | "y" % "c"')),
    "ten patterns, none of which ends": ("grammar", "start: A\nA: " + " & ".join(["/.*/"] * 10)),
    "no way out": ("schema", chain(1, within, {"$ref": "#/$defs/d0"})),
    "sixty thousand values": ("schema", {"enum": [f"v{i * 7919 % 100003}" for i in range(60_000)]}),
    "a long value": ("schema", {"const": "x" * 200_000}),
    "a billion nulls": ("schema", {"type": "array", "items": {"type": "null"}, "minItems": 10**9}),
    "a billion letters": ("schema", {"type": "string", "minLength": 10**9}),
    "stars under stars": ("regex", "((((a+)+)+)+)+b"),
    "all ways at once": ("regex", "(a|aa)+(a|aa)+(a|aa)+c"),
    "2^60 states": ("regex", "(a|b)*a(a|b){60}"),
    "any letters": ("regex", r"(\p{L}|\p{M}|\w|\s|.){300}"),
    "a schema that multiplies": (
        "schema",
        chain(30, lambda x: {"type": "array", "prefixItems": [x] * 10, "minItems": 10, "items": False}),
    ),
    "2,500 properties": ("schema", {"properties": {f"p{i}": {"type": "null"} for i in range(2500)}}),
    "an unknown word": ("schema", {"type": "string", "maxLength": 3, "frobnicate": {"pattern": 5}}),
}


@pytest.mark.parametrize("name", BORNE)
def test_borne(name: str, tokenizer: Tokenizer) -> None:
    """Thirty tokens of it, or an error when it becomes too much."""
    field, value = BORNE[name]
    model = over(tokenizer)
    with contextlib.suppress(RequestError):
        answer = model.generate("x", **{field: value}, temperature=1.0, seed=1, max_tokens=30)
        assert answer.finish_reason in ("stop", "length")


# ── what it is not ───────────────────────────────────────────────────────────────────────────────────────────


def test_ordinary_forms_are_not_refused(tokenizer: Tokenizer) -> None:
    """Parts that hold together, references, whole numbers of 64 bits, and words that look like something else."""
    person = {"properties": {"name": {"type": "string", "pattern": "^[a-z]+$"}, "mail": {"format": "email"}}}
    guides(tokenizer, schema={"allOf": [{"$ref": "#/$defs/p"}, {"required": ["name"]}], "$defs": {"p": person}})
    names = {f"n{i}": {"type": "string", "pattern": f"^a{i}$"} for i in range(40)}
    guides(tokenizer, schema={"allOf": [{"properties": names}, {"required": ["n1"]}]})
    guides(tokenizer, schema={"anyOf": [{"type": "string", "pattern": f"^a{i}$"} for i in range(40)]})
    for low, high in ((0, 2**63 - 1), (0, 2**64 - 1), (-(2**53), 2**53)):
        guides(tokenizer, schema={"type": "integer", "minimum": low, "maximum": high})
    guides(tokenizer, schema={"const": {"pattern": "(", "exclusiveMinimum": 0, "maximum": 0.5}})
    guides(tokenizer, schema={"properties": {"const": {"type": "null"}, "$ref": {"type": "null"}}})
    guides(tokenizer, schema={"type": "null", "default": 10**30, "examples": [10**30], "title": "allOf"})
    guides(tokenizer, grammar=f"start: A | b\nA: /a&b{{2}}/\nb: %json {json.dumps(person)}")
    guides(tokenizer, regex=r"a\\")
    guides(tokenizer, schema={"type": "string", "pattern": r"a\\"})
    guides(tokenizer, schema={"properties": {f"p{i}": {"type": "null"} for i in range(2000)}, "required": ["p1"]})


def test_parameters_that_change_after_texts(tokenizer: Tokenizer) -> None:
    """Permutations, and counting, as llguidance's documentation has them."""
    made = guides(
        tokenizer,
        grammar="""start: perm::0x0
        perm::_ : "" %if is_ones([0:2])
                | "a" perm::set_bit(0) %if bit_clear(0)
                | "B"i perm::set_bit(1) %if bit_clear(1)""",
    )
    assert [text for text in ("ab", "bA", "aB", "ba", "aa", "a", "") if text_fits(made, tokenizer, text)] == [
        "ab",
        "aB",
        "ba",
    ]
    made = guides(tokenizer, grammar='start: p::0\np::_: "a" p::incr(_) %if lt(_, 3) | q::_\nq::_: "b" %if ge(_, 2)')
    assert [n for n in range(6) if text_fits(made, tokenizer, "a" * n + "b")] == [2, 3]


def test_white_space_of_a_schemas_own(tokenizer: Tokenizer) -> None:
    """As it says; where it says nothing of it, bounded as everywhere."""
    texts = ("[1,2]", "[1, 2]", "[1 ,2]", "[ 1,2]", "[" + " " * 41 + "1,2]")
    wanted: list[tuple[Any, tuple[int, ...]]] = [
        ({"coerce_one_of": True}, (1, 1, 1, 1, 0)),
        ({"whitespace_flexible": False}, (1, 0, 0, 0, 0)),
        ({"whitespace_pattern": r"[ \n]{0,2}"}, (1, 1, 1, 1, 0)),
        ({"whitespace_flexible": False, "item_separator": r",\x20?"}, (1, 1, 0, 0, 0)),
    ]
    for own, fits in wanted:
        schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": own}
        made = guides(tokenizer, schema=schema)
        assert tuple(text_fits(made, tokenizer, text) for text in texts) == fits, own


def text_fits(made: Guides, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a form takes a text, byte by byte, to its end."""
    letters = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    guide, size = made.new(), tokenizer.vocab_size
    for place, byte in enumerate(text.encode()):
        index = letters[bytes([byte])]
        if not guide.allowed(size)[index]:
            return False
        if guide.take(index):
            return place == len(text.encode()) - 1
    return bool(guide.allowed(size)[tokenizer.eos_ids[0]])


@pytest.mark.parametrize(
    ("low", "high"), [("10", "11.5"), ("9.5", "10"), ("-11", "-10"), ("0", "1"), ("99.99", "100"), ("0.25", "0.5")]
)
def test_a_range_lets_in_what_is_in_it(low: str, high: str, tokenizer: Tokenizer) -> None:
    """By exact decimals, at both ends and around them. It need not let in every spelling."""
    ends = [Decimal(low), Decimal(high)]
    steps = [Decimal(step) * sign for step in ("0", "1", "0.1", "0.001", "0.0000001") for sign in (1, -1)]
    spellings = {format(end + step, f".{n}f") for end in ends for step in steps for n in (0, 1, 3, 8)}
    for kinds in product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        made = guides(tokenizer, schema={"type": "number", kinds[0]: float(low), kinds[1]: float(high)})
        taken = {text for text in spellings if text_fits(made, tokenizer, text)}
        for text in taken:
            value = Decimal(text)
            assert value >= ends[0] if kinds[0] == "minimum" else value > ends[0], (text, kinds)
            assert value <= ends[1] if kinds[1] == "maximum" else value < ends[1], (text, kinds)
        assert len(taken) > 1


# ── panics, and no room ──────────────────────────────────────────────────────────────────────────────────────


class PanicException(BaseException):
    """What a panic in native code arrives as."""


def test_panics_are_errors(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of the places where llguidance is asked something."""

    def panic(*_: Any, **__: Any) -> Any:
        raise PanicException("index out of bounds")

    guide = guides(tokenizer, regex="ab").new()
    broken = type("Broken", (), {"compute_bitmask": panic, "consume_token": panic})()
    monkeypatch.setattr(guide, "_matcher", broken)
    for call in (lambda: guide.allowed(9), lambda: guide.take(70), lambda: guides(tokenizer, regex="ab")):
        with monkeypatch.context() as patch:
            patch.setattr("llguidance.LLMatcher.grammar_from_regex", panic, raising=False)
            with pytest.raises(RequestError, match="broke down") as caught:
                call()
        assert caught.value.field == "regex"


def test_a_panic_that_is_told_as_an_error() -> None:
    """Some arrive as a text with a backtrace."""
    matcher = type("Failed", (), {"get_error": lambda _: "panic: assertion failed\n<backtrace>\n 0: <unknown>"})()
    said = constrain._failed(matcher, "grammar", "cannot be used")
    assert (said.field, "backtrace" in str(said), "broke down" in str(said)) == ("grammar", False, True)


def test_other_exceptions_come_through() -> None:
    for kind in (KeyboardInterrupt, ValueError, RequestError):
        with pytest.raises(kind):
            bounds.with_room(lambda kind=kind: (_ for _ in ()).throw(kind("x")))
    assert bounds.with_room(lambda: 5) == 5


def test_no_room_for_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.stack_size()
    monkeypatch.setattr(bounds, "STACK", 1 << 50)
    with pytest.raises(ResourceError):
        bounds.with_room(lambda: 5)
    assert threading.stack_size() == before


def test_from_a_thread_with_little_stack(tokenizer: Tokenizer) -> None:
    model: Model = over(tokenizer)
    found: list[Any] = []
    before = threading.stack_size(512 << 10)
    try:
        form = chain(900, within)
        thread = threading.Thread(target=lambda: found.append(model.generate("x", schema=form, max_tokens=3)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert len(found[0].tokens) == 3
