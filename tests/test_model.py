"""The facade: shapes in and out, what it refuses, and what a folder tells it."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cutaway
from cutaway.errors import CutawayError, NameNotFound, RequestError
from cutaway.model import Model
from tests.reference import tiny

V, D = 64, 32


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny.transformer("llama"))


def ids(n: int, seed: int = 1) -> list[int]:
    return tiny.ids(n, seed=seed).tolist()


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("call", "width"), [("logits", V), ("hidden", D)])
def test_shapes(model: Model, call: str, width: int) -> None:
    """One text, a rectangle, a ragged batch; lists, tuples, tensors, arrays."""
    compute = getattr(model, call)
    one = compute(ids(7))
    assert one.shape == (1, 7, width)
    for form in (tuple(ids(7)), torch.tensor(ids(7)), np.array(ids(7)), [np.int64(i) for i in ids(7)]):
        assert torch.equal(compute(form), one)

    pair = [ids(7), ids(7, 2)]
    both = compute(pair)
    assert both.shape == (2, 7, width)
    assert float((both[:1] - one).abs().max()) < 1e-5
    for form in (tuple(map(tuple, pair)), torch.tensor(pair), np.array(pair), [torch.tensor(row) for row in pair]):
        assert torch.equal(compute(form), both)
    assert compute([ids(7)]).shape == (1, 7, width)
    assert compute(ids(1)).shape == (1, 1, width)

    ragged = compute([ids(7), ids(1, 3), ids(30, 4)])
    assert isinstance(ragged, list)
    assert [tuple(row.shape) for row in ragged] == [(7, width), (1, width), (30, width)]
    for row, text in zip(ragged, (ids(7), ids(1, 3), ids(30, 4)), strict=True):
        assert float((row - compute(text)[0]).abs().max()) < 1e-5
    assert not one.requires_grad


@pytest.mark.parametrize("call", ["logits", "hidden"])
@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ([], "ids"),
        (torch.empty(0, dtype=torch.long), "ids"),
        ([[]], "ids/0"),
        ([[1], []], "ids/1"),
        ([1, 64], "ids/1"),
        ([-1], "ids/0"),
        ([True], "ids/0"),
        ([1.0], "ids/0"),
        ([None], "ids/0"),
        (["a"], "ids/0"),
        (torch.tensor([1.0]), "ids/0"),
        (torch.tensor([True]), "ids/0"),
        ([[1, 2], [3, 64]], "ids/1/1"),
        ([1, [2]], "ids"),
        ([[1], 2], "ids"),
        ([[[1]]], "ids/0/0"),
        (torch.zeros(1, 1, 1, dtype=torch.long), "ids/0/0"),
        (torch.tensor(5), "ids"),
        (5, "ids"),
        (None, "ids"),
        ("text", "ids"),
        (b"text", "ids"),
        ({1: 2}, "ids"),
    ],
)
def test_ids_that_make_no_sense(model: Model, call: str, bad: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        getattr(model, call)(bad)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ([], "prompt"),
        ([[]], "prompt/0"),
        ([[1], [2, 99]], "prompt/1/1"),
        ([1, "a"], "prompt/1"),
        ([True], "prompt/0"),
        ([1.5], "prompt/0"),
        (torch.tensor([[1, 64]]), "prompt/0/1"),
        (None, "prompt"),
        (5, "prompt"),
        (b"abc", "prompt"),
        ({"role": "user", "content": "hi"}, "prompt"),
        ("text", "prompt"),  # there is no tokenizer
        (["text"], "prompt/0"),
        ([{"role": "user", "content": "hi"}], "prompt"),
    ],
)
def test_prompts_that_make_no_sense(model: Model, bad: Any, field: str) -> None:
    for call in (model.generate, model.trace):
        with pytest.raises(RequestError) as caught:
            call(bad)
        assert caught.value.field == field


def test_prompts_in_every_form(model: Model) -> None:
    wanted = model.generate(ids(5), max_tokens=4)
    for form in (tuple(ids(5)), torch.tensor(ids(5)), np.array(ids(5))):
        assert model.generate(form, max_tokens=4) == wanted
    for form in ([ids(5)], torch.tensor([ids(5)]), np.array([ids(5)]), [torch.tensor(ids(5))], (ids(5),)):
        assert model.generate(form, max_tokens=4) == [wanted]
    assert list(model.stream(ids(5), max_tokens=4)) == []
    assert model.generate(ids(5), max_tokens=4, n=2, temperature=0) == [
        wanted,
        type(wanted)(wanted.text, wanted.tokens, "length", wanted.usage, None, 1),
    ]


def test_arguments_by_name(model: Model) -> None:
    for call in (model.generate, model.stream):
        for arguments, field in (
            ({"temprature": 1}, "temprature"),
            ({"num_beams": 0}, "num_beams"),
            ({"schema": {}}, "schema"),
            ({"deterministic": 1}, "deterministic"),
            ({"top_p": math.nan}, "top_p"),
            ({"max_tokens": True}, "max_tokens"),
        ):
            with pytest.raises(RequestError) as caught:
                call(ids(3), **arguments)
            assert caught.value.field == field
        call(ids(3), max_tokens=1, num_beams=1, schema=None, deterministic=False)
    for arguments, field in (({"n": 2}, "n"), ({"prompt": [ids(3), ids(4)]}, "prompt")):
        with pytest.raises(RequestError) as caught:
            model.stream(**{"prompt": ids(3), **arguments})
        assert caught.value.field == field


def test_repr_says_what_it_is(model: Model) -> None:
    assert "llama, 3 layers, d_model 32" in repr(model)


def test_a_name_that_nothing_has(model: Model) -> None:
    with pytest.raises(NameNotFound) as caught:
        model.trace(ids(3), "decoder.layers.0.attn.weigths")
    assert "decoder.layers.0.attn.weights" in (caught.value.hint or "")


# ── a folder, with text ──────────────────────────────────────────────────────────────────────────────────────


def tokenizer_json(folder: Path) -> None:
    """A byte-level vocabulary of 64: three control tokens, letters, and the bytes of one emoji."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("abcdefghijklmnopqrstuvwxyz🙂.,!?\n ")
    first = dict.fromkeys("".join(piece for piece, _ in spelt))
    letters = [*first, *(letter for letter in alphabet if letter not in first)][:61]
    vocab = {text: i for i, text in enumerate(["<pad>", "<s>", "</s>", *letters])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.write(tiny.config("llama"), tmp_path_factory.mktemp("model") / "tiny")
    tokenizer_json(path)
    return path


@pytest.fixture(scope="module")
def talking(folder: Path) -> Model:
    return cutaway.load(folder)


def test_text_in_text_out(talking: Model) -> None:
    tokenizer = talking.tokenizer
    assert tokenizer is not None
    result = talking.generate("hello 🙂", max_tokens=24, temperature=1.0, seed=4)
    assert result.usage.prompt_tokens == len(tokenizer.encode("hello 🙂"))
    assert result.text == tokenizer.decode(result.tokens, continuation=True)
    several = talking.generate(["hello 🙂", "a", [5, 6, 7]], max_tokens=24, temperature=1.0, seed=4)
    assert several[0].text == result.text
    assert len(several) == 3
    # An empty text begins with BOS.
    assert talking.generate("", max_tokens=2, temperature=0) == talking.generate([1], max_tokens=2, temperature=0)
    assert talking.score("hello").tokens == tokenizer.encode("hello")


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_is_the_whole(talking: Model, seed: int) -> None:
    for stop in (None, "e", ["ab", "🙂", " "]):
        arguments = {"max_tokens": 24, "temperature": 2.0, "seed": seed, "stop": stop, "logprobs": 1}
        stream = talking.stream("hello", **arguments)
        pieces = list(stream)
        assert stream.result == talking.generate("hello", **arguments)
        assert "".join(pieces) == stream.result.text
        for text in [stop] if isinstance(stop, str) else stop or []:
            assert text not in stream.result.text


def test_a_stream_given_up(talking: Model) -> None:
    """What came so far is there, and the next call knows nothing of it."""
    wanted = talking.generate("hello", max_tokens=20, temperature=1.0, seed=1)
    stream = talking.stream("hello", max_tokens=20, temperature=1.0, seed=1)
    first = next(stream)
    assert first
    assert wanted.text.startswith(stream.result.text)
    assert stream.result.finish_reason is None
    assert talking.generate("hello", max_tokens=20, temperature=1.0, seed=1) == wanted
    assert first + "".join(stream) == wanted.text
    assert stream.result == wanted


@pytest.mark.parametrize(
    ("config", "generation", "ends"), [(2, [2, 30], {2, 30}), (2, [5], {2, 5}), (7, None, {2, 7}), (None, None, {2})]
)
def test_end_tokens_are_a_union(
    tmp_path: Path, folder: Path, config: int | None, generation: list[int] | None, ends: set[int]
) -> None:
    """Case S11: of the tokenizer's (2), the config's and the generation config's."""
    for file in folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they differ is said; see the tests of loading
        model = cutaway.load(tmp_path)
    assert set(model.settings.eos_ids) == ends
    for end in ends:  # each of them really ends an answer, and does not show
        result = model.generate("ab", max_tokens=9, temperature=0, logit_bias={end: 1e4})
        assert (result.tokens, result.text, result.finish_reason) == ([end], "", "stop")


def test_saving_over_what_was_loaded(tmp_path: Path, folder: Path) -> None:
    """Case C12: old tensors stay, the new file is whole, and a failure leaves the old one."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = cutaway.load(tmp_path, mmap=True)
    before = model.logits(ids(9))
    assert isinstance(before, torch.Tensor)
    old = {name: tensor.clone() for name, tensor in model.transformer.state_dict().items()}
    cutaway.save(model, tmp_path)
    for name, tensor in model.transformer.state_dict().items():
        assert torch.equal(tensor, old[name])
    again = cutaway.load(tmp_path)
    assert torch.equal(again.logits(ids(9)), before)
    assert again.tokenizer is not None
    assert not [file.name for file in tmp_path.iterdir() if "tmp" in file.name]
    with pytest.raises(CutawayError):
        cutaway.save(model, tmp_path / "config.json" / "inside")
    with pytest.raises(RequestError) as caught:
        cutaway.save(model, tmp_path, format="onnx")
    assert caught.value.field == "format"
