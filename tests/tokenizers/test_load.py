"""Rows T1 to T11, and the files beside tokenizer.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutaway.errors import CutawayError, FormatError, LimitExceeded, StorageError, TemplateError, TokenizerError
from cutaway.tokenizers import Tokenizer, from_folder
from tests.tokenizers import small

Change = Callable[[dict[str, Any]], Any]


def load(root: Path, tree: Any = None, *, vocab_rows: int | None = None, **files: Any) -> Tokenizer:
    tokenizer = from_folder(small.folder(root, tree, **files), vocab_rows=vocab_rows)
    assert tokenizer is not None
    return tokenizer


def put(*keys: Any) -> Change:
    *path, last, value = keys

    def change(tree: Any) -> None:
        for key in path:
            tree = tree[key]
        tree[last] = value

    return change


def split(regex: str) -> Change:
    return put("pre_tokenizer", {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False})


def template(**change: Any) -> Change:
    row = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    table = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    return put(
        "post_processor", {"type": "TemplateProcessing", "single": row, "pair": row, "special_tokens": table} | change
    )


def added(**change: Any) -> Change:
    token = {"id": 600, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False}
    return lambda tree: tree["added_tokens"].append(token | {"normalized": False, "special": True} | change)


ROWS: dict[str, tuple[str, Change]] = {
    "T1 merge longer than any key": ("/model/merges/3", put("model", "merges", 3, ["Ġthe", "Ġthe"])),
    "T2 nested quantifier": ("/pre_tokenizer/pattern/Regex", split("(a+)+$")),
    "T2 nested quantifier, class": ("/pre_tokenizer/pattern/Regex", split(r"(?:[a-z]*)*\b")),
    "T2 not a regex": ("/pre_tokenizer", split("(")),
    "T3 FixedLength 0": ("/pre_tokenizer/length", put("pre_tokenizer", {"type": "FixedLength", "length": 0})),
    "T3 template token missing": ("/post_processor/single", template(special_tokens={})),
    "T3 template id past any model": (
        "/post_processor/special_tokens/a",
        template(special_tokens={"a": {"id": "a", "ids": [2**32 - 1], "tokens": ["a"]}}),
    ),
    "T3 stride": (
        "/truncation/stride",
        put("truncation", {"max_length": 4, "stride": 4, "strategy": "LongestFirst", "direction": "Right"}),
    ),
    "T3 charsmap": ("/normalizer", put("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="})),
    "T4 two tokens, one id": ("/model/vocab/~0x", put("model", "vocab", "~x", 5)),
    "T5 id 2**32 - 1": ("/model/vocab/~0x", put("model", "vocab", "~x", 2**32 - 1)),
    "T6 id -1": ("/model/vocab/~0x", put("model", "vocab", "~x", -1)),
    "T6 id 1.5": ("/model/vocab/~0x", put("model", "vocab", "~x", 1.5)),
    "T6 id true": ("/model/vocab/~0x", put("model", "vocab", "~x", True)),
    "T6 merge of unknown": ("/model/merges/0", put("model", "merges", 0, ["語", "a"])),
    "T6 merge of one": ("/model/merges/0", put("model", "merges", 0, "ab")),
    "T6 merge of three": ("/model/merges/0", put("model", "merges", 0, ["a", "b", "c"])),
    "T6 merge of numbers": ("/model/merges/0", put("model", "merges", 0, [1, 2])),
    "T6 merge of nothing": ("/model/merges/0", put("model", "merges", 0, ["", "a"])),
    "T6 no merges": ("/model/merges", put("model", "merges", None)),
    "T6 empty vocabulary": ("/model/vocab", put("model", "vocab", {})),
    "T6 vocabulary is a list": ("/model/vocab", put("model", "vocab", [["a", 0]])),
    "T6 no model": ("/model", put("model", None)),
    "T6 unknown token is not there": ("/model/unk_token", put("model", "unk_token", "<nope>")),
    "T8 id of another": ("/added_tokens/3/id", added(id=7)),
    "T8 other id than in the vocabulary": ("/added_tokens/3/id", added(content="Ġ")),
    "T8 empty": ("/added_tokens/3/content", added(content="")),
    "T8 twice": ("/added_tokens/3/content", added(content="<|im_end|>", id=2)),
    "T8 1 MB": ("/added_tokens/3/content", added(content="x" * 10**6)),
    "T8 id not reachable": ("/added_tokens/3/id", added(id=700)),
    "T8 id is text": ("/added_tokens/3/id", added(id="600")),
    "T8 no object": ("/added_tokens/0", put("added_tokens", 0, "x")),
    "T8 no list": ("/added_tokens", put("added_tokens", {})),
    "T9 model": ("/model/type", put("model", "type", "Magic")),
    "T9 normalizer": ("/normalizer/type", put("normalizer", {"type": "Magic"})),
    "T9 pre_tokenizer": (
        "/pre_tokenizer/pretokenizers/0/type",
        put("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Magic"}]}),
    ),
    "T9 decoder": ("/decoder/type", put("decoder", {"type": ["x"]})),
    "T9 post_processor": ("/post_processor/type", put("post_processor", 3)),
    "T9 missing field": ("/normalizer", put("normalizer", {"type": "Replace"})),
}


@pytest.mark.parametrize("row", ROWS)
def test_rows(tmp_path: Path, row: str):
    field, change = ROWS[row]
    tree = small.tree_of()
    change(tree)
    with pytest.raises(TokenizerError) as caught:
        load(tmp_path, tree)
    assert caught.value.field == field
    assert caught.value.path is not None
    assert caught.value.path.endswith("tokenizer.json")


def test_t2_a_slow_pattern_is_an_error_at_the_text(tmp_path: Path):
    """Not every slow pattern can be told by its looks."""
    tree = small.tree_of()
    split("(?:a|a|aa)+$")(tree)
    tokenizer = load(tmp_path, tree)
    with pytest.raises(TokenizerError, match="cannot be encoded"):
        tokenizer.encode("a" * 60 + "b")


def test_t5_against_the_embedding(tmp_path: Path):
    size = 600
    assert load(tmp_path, vocab_rows=size).vocab_size == size
    with pytest.raises(TokenizerError, match="past the model's embedding") as caught:
        load(tmp_path, vocab_rows=size - 1)
    assert (caught.value.expected, caught.value.got) == ("below 599", "599")


def test_t7_holes_and_padded_rows(tmp_path: Path):
    tree = small.tree_of()
    tree["model"]["vocab"]["far"] = 700
    tokenizer = load(tmp_path, tree, vocab_rows=1024)
    assert tokenizer.vocab_size == 701
    assert tokenizer.decode([650, 700, 1023]) == "far"


def test_added_tokens_past_the_embedding_are_left_out(tmp_path: Path):
    """As Gemma 3's image token in the file of a text-only model."""
    tree = small.tree_of()
    added()(tree)
    tokenizer = load(tmp_path, tree, vocab_rows=600)
    assert tokenizer.vocab_size == 600
    assert "<x>" not in tokenizer.special
    for special in (True, False):
        assert max(tokenizer.encode("a<x>b", special=special)) < 600


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": {"vocab": {"a": NaN}}}',
        b"\xef\xbb\xbf{}",
        b'{"a": 1, "a": 2}',
        b"\xff",
        b"[" * 10**5,
    ],
)
def test_t6_not_even_json(tmp_path: Path, data: bytes):
    with pytest.raises(TokenizerError):
        load(tmp_path, data)


def test_t6_every_prefix(tmp_path: Path):
    data = small.byte_level_json().encode()
    for end in range(0, len(data), 997):
        with pytest.raises(TokenizerError):
            load(tmp_path, data[:end])


def test_t10_too_large(tmp_path: Path):
    root = small.folder(tmp_path)
    with pytest.raises(LimitExceeded):
        from_folder(root, limit=1000)
    with (tmp_path / "tokenizer.json").open("r+b") as file:
        file.truncate((64 << 20) + 1)  # a sparse file: nothing is read of it
    with pytest.raises(LimitExceeded):
        from_folder(root)


def test_no_tokenizer(tmp_path: Path):
    assert from_folder(tmp_path) is None
    with pytest.raises(StorageError):
        from_folder(tmp_path / "missing")


def test_odd_files(tmp_path: Path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(FormatError, match="not a regular file"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(TokenizerError, match="links out"):
        from_folder(tmp_path)


def test_unigram(tmp_path: Path):
    pieces = [
        ["<unk>", 0.0],
        ["</s>", 0.0],
        ["▁the", -1.0],
        ["▁", -2.0],
        ["t", -3.0],
        ["he", -3.5],
        ["c", -4.0],
        ["<", -9.0],
    ]
    tree = {
        "version": "1.0",
        "added_tokens": [small.tree_of()["added_tokens"][0] | {"id": 1, "content": "</s>"}],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }
    tokenizer = load(tmp_path, tree, tokenizer_config={"eos_token": "</s>", "unk_token": "<unk>"})
    assert tokenizer.encode("the the") == [2, 2]
    assert tokenizer.decode([2, 2]) == "the the"
    assert tokenizer.encode("the", continuation=True) == [4, 5]
    assert 1 not in tokenizer.encode("the </s>")  # by the model's own scores it would be
    assert tokenizer.encode("</s>", special=True) == [1]
    for field, change in {
        "/model/unk_id": put("model", "unk_id", 99),
        "/model/vocab/2": put("model", "vocab", 2, ["x"]),
        "/model/vocab/3": put("model", "vocab", 3, ["t", 0.0]),
    }.items():
        broken = json.loads(json.dumps(tree))
        change(broken)
        with pytest.raises(TokenizerError) as caught:
            load(tmp_path, broken)
        assert caught.value.field in (field, "/model/vocab/4")


# -- roles and rules


def test_roles_in_every_spelling(tmp_path: Path):
    spelled = {"content": "<|im_end|>", "lstrip": False, "__type": "AddedToken"}
    for name, files in {
        "string": {"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": None}},
        "object": {"tokenizer_config": {"eos_token": spelled}},
        "map": {"special_tokens_map": {"eos_token": "<|im_end|>"}},
        "config wins": {
            "tokenizer_config": {"eos_token": "<|im_end|>"},
            "special_tokens_map": {"eos_token": "<|endoftext|>"},
        },
    }.items():
        tokenizer = load(tmp_path / name, **files)
        assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id) == ((2,), None, None)


def test_roles_become_control_tokens(tmp_path: Path):
    tree = small.tree_of()
    for token in tree["added_tokens"]:
        token["special"] = False
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|endoftext|>"]}
    tokenizer = load(tmp_path, tree, tokenizer_config=config)
    assert set(tokenizer.special) == set(small.CONTROL)
    assert not set(tokenizer.special.values()) & set(tokenizer.encode("<|im_end|>"))
    assert tokenizer.decode([1, 2]) == ""


def test_bos_rules(tmp_path: Path):
    tree = small.tree_of()
    template()(tree)
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert load(tmp_path, tree).encode("") == [1]  # the post-processor's
    assert load(tmp_path, tree, tokenizer_config=config).adds_bos
    assert load(tmp_path, tree, tokenizer_config=config | {"add_bos_token": False}).encode("") == []
    both = load(tmp_path, None, tokenizer_config=config | {"add_bos_token": True, "add_eos_token": True})
    assert both.encode("") == [1, 2]


def test_truncation_padding_and_dropout_are_off(tmp_path: Path):
    tree = small.tree_of()
    tree["truncation"] = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    tree["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    tree["padding"]["pad_to_multiple_of"] = None
    tree["model"]["dropout"] = 0.9
    tokenizer = load(tmp_path, tree)
    assert tokenizer.encode("a quick test of it all") == small.byte_level().encode("a quick test of it all")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"eos_token": "<nope>"}, "/eos_token"),
        ({"eos_token": 7}, "/eos_token"),
        ({"eos_token": {"content": None}}, "/eos_token"),
        ({"eos_token": ""}, "/eos_token"),
        ({"add_bos_token": True}, "/bos_token"),
        ({"add_eos_token": True}, "/eos_token"),
        ({"add_bos_token": "yes"}, "/add_bos_token"),
        ({"additional_special_tokens": "x"}, "/additional_special_tokens"),
        ({"additional_special_tokens": [3]}, "/additional_special_tokens"),
        ({"added_tokens_decoder": {"2": {"content": "<|other|>"}}}, "/added_tokens_decoder/2"),
        ({"added_tokens_decoder": {"-1": {"content": "x"}}}, "/added_tokens_decoder/-1"),
        ({"added_tokens_decoder": {"9999": {"content": "<x>"}}}, "/added_tokens_decoder/9999"),
        ({"added_tokens_decoder": {"600": {"content": "<x>", "special": 1}}}, "/added_tokens_decoder/600"),
        ({"added_tokens_decoder": []}, None),
    ],
)
def test_t11_bad_settings(tmp_path: Path, config: dict[str, Any], field: str | None):
    if field is None:
        load(tmp_path, tokenizer_config=config)  # empty is empty, whatever the brackets
        return
    with pytest.raises(TokenizerError) as caught:
        load(tmp_path, tokenizer_config=config)
    assert caught.value.field == field


def test_settings_may_add_tokens(tmp_path: Path):
    config = {"added_tokens_decoder": {"600": {"content": "<x>", "special": True}, "2": {"content": "<|im_end|>"}}}
    tokenizer = load(tmp_path, tokenizer_config=config | {"tokenizer_class": "NoSuchTokenizer"})
    assert tokenizer.special["<x>"] == 600


# -- where the template comes from

SAYS = "{{ '%s' }}"


def test_template_places(tmp_path: Path):
    root = small.folder(tmp_path, tokenizer_config={"chat_template": SAYS % "config"})

    def says(**kwargs: Any) -> str:
        tokenizer = from_folder(root)
        assert tokenizer is not None
        return tokenizer.render_chat([], **kwargs)

    assert says() == "config"
    (root / "chat_template.json").write_text(json.dumps({"chat_template": SAYS % "json"}))
    assert says() == "json"
    (root / "chat_template.jinja").write_text(SAYS % "jinja")
    assert says() == "jinja"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_is_that_of_the_load(tmp_path: Path, name: str):
    """It is compiled when it is first asked for, of what was read before."""
    config = {"chat_template": SAYS % "then"} if name == "tokenizer_config.json" else {}
    root = small.folder(tmp_path, tokenizer_config=config)
    if not config:
        (root / name).write_text(SAYS % "then")
    tokenizer = from_folder(root)
    assert tokenizer is not None
    (root / name).unlink()
    assert tokenizer.render_chat([]) == "then"
    assert tokenizer.chat_template is tokenizer.chat_template


def test_named_templates(tmp_path: Path):
    named = [{"name": "default", "template": SAYS % "plain"}, {"name": "tool_use", "template": SAYS % "tools"}]
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": named})
    assert tokenizer.render_chat([]) == "plain"
    assert tokenizer.render_chat([], tools=[{"a": 1}]) == "tools"
    assert tokenizer.decode(tokenizer.chat([], tools=[{"a": 1}])) == "tools"


@pytest.mark.parametrize(
    "source",
    [
        7,
        {"a": 1},
        "{% if",
        [{"name": "default", "template": "a"}, {"name": "default", "template": "b"}],
        [{"name": "a", "template": "a"}, {"name": "b", "template": "b"}],
        [{"template": "a"}],
        ["a"],
        [{"name": "default", "template": None}],
    ],
)
def test_t11_bad_template_still_loads(tmp_path: Path, source: Any):
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": source})
    assert tokenizer.chat_template is None
    assert isinstance(tokenizer.template_error, CutawayError)
    assert tokenizer.encode("x")
    with pytest.raises(TemplateError):
        tokenizer.chat([])


def test_no_template(tmp_path: Path):
    with pytest.raises(TemplateError, match="no chat template"):
        load(tmp_path).chat([])
