"""What somebody with no part in the work found when attacking encoders and encoder–decoders."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cutaway
from cutaway.checkpoints.sentence import read_sentence, sentence_files
from cutaway.errors import NameNotFound, RequestError, TokenizerError, UnsupportedModelError
from cutaway.spec.sentence import SentenceSettings
from tests.reference import tiny_seq2seq
from tests.tasks.small import TEXTS, write


def changed(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_keys_of_published_checkpoints(tmp_path: Path) -> None:
    """``_num_labels`` may be stale, and the others are settings of other people's pipelines."""
    more = {"_num_labels": 9, "summary_type": "first", "sbert_ce_default_activation_function": "torch.nn.Sigmoid"}
    folder = changed(write(tmp_path / "b", "BertForTokenClassification"), **more)
    model = cutaway.load(folder)
    cutaway.save(model, tmp_path / "copy")
    assert more.items() <= json.loads((tmp_path / "copy" / "config.json").read_text()).items()


def test_a_lowered_prompt(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write(tmp_path / "bert", "BertModel")
    (folder / "tokenizer.json").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_lower_case": False}))
    settings = SentenceSettings("mean", lower=True, prompts=(("query", "The Order: "),), default_prompt="query")
    for name, data in sentence_files(settings, 32).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:3])
    ours = cutaway.load(folder).embed(TEXTS[:3])
    assert (ours - torch.from_numpy(np.asarray(theirs))).abs().max() <= 1e-5


def test_a_token_has_one_label(tmp_path: Path) -> None:
    """Whatever ``problem_type`` says, as in the reference."""
    labels = {0: "O", 1: "A", 2: "B"}
    plain = cutaway.load(write(tmp_path / "a", "BertForTokenClassification", 5, id2label=labels)).tag(TEXTS[0])
    kind = "multi_label_classification"
    other = write(tmp_path / "b", "BertForTokenClassification", 5, id2label=labels, problem_type=kind)
    assert cutaway.load(other).tag(TEXTS[0]) == plain
    one = cutaway.load(write(tmp_path / "c", "BertForTokenClassification", 5, id2label={0: "A"}))
    assert all(span.score == 1.0 for span in one.tag(TEXTS[0]))


def test_a_trace_goes_on_as_generate_does(tmp_path: Path) -> None:
    folder = tiny_seq2seq.write(tiny_seq2seq.config("bart"), tmp_path / "m")
    rules = {"no_repeat_ngram_size": 2, "forced_bos_token_id": 0, "min_length": 4, "bad_words_ids": [[28]]}
    said = {"eos_token_id": 2, "decoder_start_token_id": 2, "num_beams": 4, **rules}
    (folder / "generation_config.json").write_text(json.dumps(said))
    model = cutaway.load(folder)
    written = model.generate([5, 6, 7], num_beams=1, max_tokens=9).tokens
    (traced,) = model.trace([5, 6, 7], "encoder.norm.out", max_tokens=9).tokens
    assert traced[1:] == written


def test_a_decoder_that_sees_ahead_does_not_generate() -> None:
    model = cutaway.build({"d_model": 32, "n_heads": 4, "layers": 1, "vocab_size": 16, "causal": False})
    for call in (model.generate, model.score):
        with pytest.raises(RequestError, match="does not say what comes next"):
            call([1, 2, 3])
    assert model.logits([1, 2, 3]).shape == (1, 3, 16)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForSequenceClassification", "BertModel"])
def test_weights_that_are_no_numbers(tmp_path: Path, kind: str) -> None:
    model = cutaway.load(write(tmp_path / "b", kind))
    with torch.no_grad():
        model.transformer.encoder.layers[1].branches["mlp"].body.down.weight[0, 0] = float("nan")
    task: Any = {"BertForMaskedLM": model.fill, "BertModel": model.embed}.get(kind, model.classify)
    with pytest.raises(RequestError, match="NaN or infinity"):
        task("the [MASK] sat")


@pytest.mark.parametrize("away", ["merges.txt", "vocab.json"])
def test_half_a_vocabulary(tmp_path: Path, away: str) -> None:
    from cutaway.tokenizers.load import from_folder

    (tmp_path / "vocab.json").write_text('{"<s>": 0, "</s>": 1, "<unk>": 2, "<pad>": 3, "<mask>": 4, "a": 5}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    assert from_folder(tmp_path) is not None
    (tmp_path / away).unlink()
    with pytest.raises(TokenizerError, match="is missing"):
        from_folder(tmp_path)


def test_other_peoples_modules(tmp_path: Path) -> None:
    for name, data in sentence_files(SentenceSettings(), 32).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    steps = json.loads((tmp_path / "modules.json").read_text())
    steps[0]["type"] = "custom_st.Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(UnsupportedModelError, match=r"custom_st\.Transformer"):
        read_sentence(tmp_path)


def test_what_killed_saves_left_is_swept(tmp_path: Path) -> None:
    model = cutaway.build({"d_model": 32, "n_heads": 4, "layers": 1, "vocab_size": 16})
    old, new, other = (tmp_path / name for name in (f".{'a' * 16}.tmp", f".{'b' * 16}.tmp", ".mine.tmp"))
    for path in (old, new, other):
        path.write_text("x")
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    cutaway.save(model, tmp_path, format="cutaway")
    assert [path.exists() for path in (old, new, other)] == [False, True, True]


def test_calls_that_make_no_sense(tmp_path: Path) -> None:
    bare = cutaway.load(write(tmp_path / "bare", "BertModel"))
    labelled = cutaway.load(write(tmp_path / "labelled", "BertForSequenceClassification"))
    masked = cutaway.load(write(tmp_path / "masked", "BertForMaskedLM"))
    calls: list[tuple[Any, Any]] = [(bare.embed, x) for x in (None, 5, {"a": 1}, [None])]
    calls += [(bare.tag, None), (masked.fill, None), (masked.fill, ["[MASK]"])]
    calls += [(labelled.classify, x) for x in (None, 3, [None], [["a", "b"]], (1, 2), b"ab", ("a",), (), ("a",) * 3)]
    for call, value in calls:
        with pytest.raises(RequestError):
            call(value)
    with pytest.raises(TokenizerError, match="half a surrogate pair"):
        masked.fill("[MASK]\ud800")
    for wrong in ({"pool": ["mean"]}, {"normalize": "no"}, {"prompt": 3}):
        with pytest.raises(RequestError):
            bare.embed("a", **wrong)
    with pytest.raises(RequestError, match="mask is no positions"):
        bare.transformer(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool))


def test_what_was_not_kept(tmp_path: Path) -> None:
    model = cutaway.load(write(tmp_path / "bare", "BertModel"))
    kept = model.trace([2, 5, 3], "embed.out")
    with pytest.raises(NameNotFound, match="was not kept"):
        kept["encoder.norm.out"]


def test_heads_that_only_training_used_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "pre", "BertForPreTraining")
    with pytest.warns(UserWarning, match=r"left behind.*cls\.seq_relationship"):
        cutaway.load(folder)


def test_a_source_with_tokens_that_the_answer_has_not(tmp_path: Path) -> None:
    """Of two tables, the source's is the one that a text is read with."""
    import shutil

    from tests.tokenizers import small

    folder = tiny_seq2seq.write(tiny_seq2seq.config("marian-two-tables"), tmp_path / "m")
    size = len(small.tree_of(small.byte_level_json())["model"]["vocab"])
    assert size > 64
    wider = tiny_seq2seq.config("marian-two-tables") | {"vocab_size": size + 8}
    shutil.rmtree(folder)
    folder = tiny_seq2seq.write(wider, tmp_path / "m")
    small.folder(folder, small.tree_of(small.byte_level_json()))
    model = cutaway.load(folder)
    assert model.tokenizer is not None
    assert max(model.tokenizer.encode("hello ü 🙂")) >= 64
    assert model.hidden(model.tokenizer.encode("hello ü 🙂")).shape[-1] == 32


def test_a_tokenizer_is_taken_by_its_name_only(tmp_path: Path) -> None:
    """Another file beside a tokenizer.json does not stand for it."""
    folder = write(tmp_path / "bert", "BertModel")
    words = {"kind": "encoder", "d_model": 32, "n_heads": 4, "layers": 1, "pool": "mean"}
    for good in (folder, folder / "tokenizer.json"):
        assert cutaway.build(words, tokenizer=good).tokenizer is not None
    for bad in (folder / "config.json", tmp_path / "nowhere", 5):
        with pytest.raises(RequestError, match="tokenizer"):
            cutaway.build(words, tokenizer=bad)  # type: ignore[arg-type]
