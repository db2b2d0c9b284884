"""Encoder–decoders that write: greedy and with beams, against transformers, fifty sources each."""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway.errors import RequestError
from cutaway.model import Model
from cutaway.spec import GenerationSettings
from tests.generation.test_beam import compare
from tests.reference import tiny_seq2seq

LENGTHS = (1, 2, 5, 9, 14)
ROOM = 10
FAMILIES = ("t5", "bart", "marian")
ENDS = {"t5": (46, 12), "bart": (2, 28), "marian": (0, 51)}  # tokens that these models like well enough


@functools.cache
def both(name: str) -> tuple[Model, Any]:
    """Ours and theirs, of one folder."""
    import transformers

    with tempfile.TemporaryDirectory() as made:
        folder = tiny_seq2seq.write(tiny_seq2seq.config(name), Path(made) / "model")
        kinds = {
            "t5": transformers.T5ForConditionalGeneration,
            "bart": transformers.BartForConditionalGeneration,
            "marian": transformers.MarianMTModel,
        }
        hf = kinds[name].from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        return cutaway.load(folder), hf


def sources() -> list[list[int]]:
    found = []
    for n in LENGTHS:
        for seed in range(10):
            random = torch.Generator().manual_seed(100 * n + seed)
            found.append(torch.randint(3, 60, (n,), generator=random).tolist())
    return found


def ours(name: str, own: dict[str, Any], **arguments: Any) -> list[list[tuple[list[int], float]]]:
    """All fifty together, a ragged batch."""
    model, _ = both(name)
    settings = {"eos_ids": ENDS[name], "decoder_start_id": model.settings.decoder_start_id, **own}
    asked = Model(model.transformer, None, GenerationSettings(**settings))
    n = arguments.get("n", 1)
    found = asked.generate(sources(), **{"max_tokens": ROOM, **arguments})
    answers = [(one.tokens, one.score if one.score is not None else 0.0) for one in found]
    return [answers[i : i + n] for i in range(0, len(answers), n)]


def theirs(name: str, **options: Any) -> list[list[tuple[list[int], float]]]:
    """Sources of one length together, so that nothing is padded."""
    model, hf = both(name)
    n, rows = options.get("num_return_sequences", 1), sources()
    groups: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        groups[len(row)].append(place)
    found: list[list[tuple[list[int], float]]] = [[] for _ in rows]
    plain = {"forced_eos_token_id": None, "forced_bos_token_id": None, "bad_words_ids": None}
    for places in groups.values():
        ids = torch.tensor([rows[place] for place in places])
        out = hf.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, return_dict_in_generate=True,
            output_scores=True, **{**plain, "max_new_tokens": ROOM, "eos_token_id": list(ENDS[name]),
            "decoder_start_token_id": model.settings.decoder_start_id, **options},
        )  # fmt: skip
        scores = out.sequences_scores.tolist() if "num_beams" in options else [0.0] * len(out.sequences)
        for i, (row, score) in enumerate(zip(out.sequences[:, 1:].tolist(), scores, strict=True)):
            last = next((j for j, token in enumerate(row) if token in ENDS[name]), ROOM - 1)
            found[places[i // n]].append((row[: last + 1], score))
    return found


RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "n-grams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "least length": ({"min_length": 5}, {"min_length": 5}),
    "forced first": ({"forced_bos_id": 7}, {"forced_bos_token_id": 7}),
    "forced last": ({"forced_eos_ids": (61,)}, {"forced_eos_token_id": 61}),
    "forbidden": (
        {"bad_words_ids": ((5,), (11, 12))},
        {"bad_words_ids": [[5], [11, 12]]},
    ),
    "repetition": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy(name: str, rule: str) -> None:
    own, options = RULES[rule]
    mine, wanted = ours(name, own), theirs(name, **options)
    assert [answers[0][0] for answers in mine] == [answers[0][0] for answers in wanted]
    ended = sum(answers[0][0][-1] in ENDS[name] for answers in mine)
    print(f"\n{name}, {rule}: 50 greedy answers the same, {ended} ended")
    assert ended, "no answer meets an end token, so that the test would not see one missed"


BEAMS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({}, {"length_penalty": 2.0, "early_stopping": True}, {"length_penalty": 2.0, "early_stopping": True}),
    ({}, {"length_penalty": 0.0, "early_stopping": "never"}, {"length_penalty": 0.0, "early_stopping": "never"}),
    (*RULES["n-grams"], {}),
    (*RULES["forced first"], {}),
    (*RULES["forced last"], {}),
    (*RULES["least length"], {}),
    (*RULES["forbidden"], {}),
]


@pytest.mark.parametrize("case", range(len(BEAMS)))
@pytest.mark.parametrize("name", FAMILIES)
def test_four_beams(name: str, case: int) -> None:
    first, second, third = BEAMS[case]
    own, arguments, options = (first, second, third) if not case or case < 3 else (first, {}, second)
    mine = ours(name, own, num_beams=4, n=4, **arguments)
    wanted = theirs(name, num_beams=4, num_return_sequences=4, **options)
    ties, worst = compare(mine, wanted, arguments.get("length_penalty", 1.0))
    ended = sum(answer[0][-1] in ENDS[name] for answers in mine for answer in answers)
    print(f"\n{name}, {own or arguments or 'plain'}: 200 answers, {ended} ended, {ties} near-ties, scores {worst:.1e}")
    assert ended > 20
    assert ties <= 2


@pytest.mark.parametrize("name", FAMILIES)
def test_the_encoder_works_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of it, whatever the decoder writes and however many beams there are."""
    model, _ = both(name)
    calls: list[str] = []
    for stack in ("encoder", "decoder"):
        for layer in getattr(model.transformer, stack).layers:
            handle = layer.register_forward_hook(lambda *_, stack=stack: calls.append(stack))
            monkeypatch.setattr(layer, "_cutaway_test", handle, raising=False)
    projected: list[int] = []
    for layer in model.transformer.decoder.layers:
        key = layer.branches["cross"].body.k
        plain = key.forward
        monkeypatch.setattr(key, "forward", lambda x, plain=plain: (projected.append(1), plain(x))[1])
    try:
        settings = GenerationSettings(decoder_start_id=model.settings.decoder_start_id)
        found = Model(model.transformer, None, settings).generate(sources()[:7], max_tokens=8, num_beams=3, n=2)
    finally:
        for stack in ("encoder", "decoder"):
            for layer in getattr(model.transformer, stack).layers:
                layer._cutaway_test.remove()
    spec = model.spec
    assert calls.count("encoder") == len(spec.encoder.layers)
    assert calls.count("decoder") == 8 * len(spec.decoder.layers)
    assert len(projected) == len(spec.decoder.layers)
    assert all(len(one.tokens) == 8 for one in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_alone_and_together(name: str) -> None:
    model, _ = both(name)
    together = model.generate(sources()[::5], max_tokens=6, temperature=0)
    for row, one in zip(sources()[::5], together, strict=True):
        alone = model.generate(row, max_tokens=6, temperature=0)
        assert (alone.tokens, alone.finish_reason) == (one.tokens, one.finish_reason)
        assert one.usage.prompt_tokens == len(row)
    drawn = model.generate(sources()[:3], max_tokens=6, temperature=1.5, seed=4)
    assert drawn[1].tokens == model.generate(sources()[1], max_tokens=6, temperature=1.5, seed=4).tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_trace(name: str) -> None:
    """Case I08: attention of all three kinds by name, and recorded steps are the rows of one whole pass."""
    model, _ = both(name)
    source, start = list(range(3, 10)), model.settings.decoder_start_id
    names = ("*.attn.weights", "*.cross.weights", "*.cross.k", "logits", "encoder.norm.out")
    steps = Model(model.transformer, None, GenerationSettings(decoder_start_id=start)).trace(
        source, *names, max_tokens=4
    )
    (target,) = steps.tokens
    assert target[0] == start
    assert len(target) == 5
    whole = model.trace(source, *names, target=target)
    heads = model.spec.decoder.layers[0].attention.n_heads
    assert whole["encoder.layers.0.attn.weights"].shape == (
        1,
        model.spec.encoder.layers[0].attention.n_heads,
        7,
        7,
    )
    assert whole["decoder.layers.0.attn.weights"].shape == (1, heads, 5, 5)
    assert whole["decoder.layers.1.cross.weights"].shape == (1, heads, 5, 7)
    for key in whole:
        torch.testing.assert_close(steps[key], whole[key], rtol=0, atol=2e-5)
        if key.endswith("weights"):
            torch.testing.assert_close(whole[key].sum(-1), torch.ones(whole[key].shape[:-1]), rtol=0, atol=1e-5)
    torch.testing.assert_close(model.logits([source], target=[target]), whole["logits"], rtol=0, atol=1e-5)
    # An edit of what the source gave is seen by every later token.
    zero = {"decoder.layers.*.cross.v": torch.zeros_like}
    edited = model.trace(source, "*.cross.z", target=target, edits=zero)
    assert all(bool((edited[key] == 0).all()) for key in edited)


def test_what_is_asked_of_the_wrong_model() -> None:
    model, _ = both("bart")
    with pytest.raises(RequestError, match="target"):
        model.logits([3, 4, 5])
    with pytest.raises(RequestError, match="one target"):
        model.logits([[3, 4], [5, 6]], target=[2])
    assert model.hidden([3, 4, 5]).shape == (1, 3, 32)
    assert [t.shape for t in model.logits([[3, 4], [5]], target=[[2, 3], [2, 3]])] == [(2, 64), (2, 64)]
    nothing = Model(model.transformer, None, GenerationSettings())
    with pytest.raises(RequestError, match="begins with"):
        nothing.generate([3, 4, 5])


@pytest.mark.parametrize("name", FAMILIES)
def test_score_of_a_target(name: str) -> None:
    model, hf = both(name)
    start = model.settings.decoder_start_id
    source, target = [5, 9, 11, 4], [7, 30, 12, 2]
    found = model.score(source, target=target)
    with torch.no_grad():
        logits = hf(torch.tensor([source]), decoder_input_ids=torch.tensor([[start, *target[:-1]]])).logits
    wanted = logits.log_softmax(-1)[0].gather(1, torch.tensor(target)[:, None])[:, 0]
    assert found.tokens == target
    torch.testing.assert_close(torch.tensor(found.logprobs), wanted, rtol=0, atol=1e-4)
    with pytest.raises(RequestError, match="target"):
        model.score(source)
