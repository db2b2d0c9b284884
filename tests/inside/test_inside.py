"""``model.inside``: words instead of ids, the same numbers, and errors that help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cutaway
from cutaway import edits, inspection
from cutaway.errors import NameNotFound, RequestError
from cutaway.model import Model
from tests.cli.conftest import config, write_folder
from tests.cli.test_encoders import BERTS, _bert, _seq2seq

Made = Callable[[str], Model]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A tiny model of a kind, with a tokenizer."""
    root, known = tmp_path_factory.mktemp("inside"), dict[str, Model]()

    def get(name: str) -> Model:
        if name not in known:
            folder = root / name
            if name in BERTS:
                _bert(*BERTS[name], folder)
            elif name in ("t5", "bart"):
                _seq2seq(name, folder)
            else:
                write_folder(folder, config())
            known[name] = cutaway.load(folder)
        return known[name]

    return get


def same(found: Any, wanted: Any) -> None:
    """Equal, but for words."""
    assert type(found) is type(wanted)
    words = ("words", "pieces", "what", "metric", "source_pieces", "columns")
    one, two = ({key: value for key, value in x.as_dict().items() if key not in words} for x in (found, wanted))
    assert one == two


TEXT = "the end"


def test_a_decoder_by_words(made: Made) -> None:
    model = made("llama")
    tokenizer, transformer, inside = model.tokenizer, model.transformer, model.inside
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    (the,) = tokenizer.encode(" the")
    (e,) = tokenizer.encode("e")
    best = int(model.logits(ids)[0, -1].argmax())
    same(inside.lens(TEXT, follow=" the"), inspection.lens(transformer, ids, target=the))
    same(inside.decompose(TEXT), inspection.decompose(transformer, ids, best))
    same(inside.decompose(TEXT, (" the", "e")), inspection.decompose(transformer, ids, (the, e)))
    same(inside.decompose(TEXT, (None, "e")), inspection.decompose(transformer, ids, (best, e)))
    assert inside.decompose(TEXT, " the").what == "logit of “ the”"
    same(inside.saliency(TEXT, "e"), inspection.saliency(transformer, ids, e))
    same(inside.occlusion(TEXT, "e", baseline="e"), inspection.occlusion(transformer, ids, e, baseline=e))
    short = {"steps": 4}
    same(inside.integrated_gradients(TEXT, "e", **short), inspection.integrated_gradients(transformer, ids, e, **short))
    same(inside.neighbours(" the"), inspection.neighbours(transformer, the))
    same(inside.analogy(" the", "e", "a"), inspection.analogy(transformer, the, e, tokenizer.encode("a")[0]))
    same(inside.head_writes(1, 2, " the"), inspection.head_writes(transformer, "decoder.layers.1.attn", 2, [the]))
    looks = inspection.head_looks_for(transformer, "decoder.layers.1.attn", 2, [the, e])
    same(inside.head_looks_for("decoder.layers.1.attn", 2, [" the", "e"]), looks)
    same(inside.head_scores([TEXT, TEXT]), inspection.head_scores(transformer, [ids, ids]))
    same(inside.copying_scores(), inspection.copying_scores(transformer))
    other = tokenizer.encode("the bnd")
    metric = inspection.logit_difference(the, e)
    same(inside.patch_sweep(TEXT, "the bnd", " the", "e"), inspection.patch_sweep(transformer, [ids], [other], metric))
    same(inside.path_sweep(TEXT, "the bnd", " the", "e"), inspection.path_sweep(transformer, [ids], [other], metric))
    names = ["decoder.layers.*.attn.z"]
    guessed = inside.attribution_patching(TEXT, "the bnd", names, "e")
    same(guessed, inspection.attribution_patching(transformer, ids, other, e, names))
    same(inside.compare(TEXT, "the bnd"), inspection.compare(transformer, transformer, ids, other))
    assert inside.compare(TEXT, model).first is None
    assert inside.plane([" the", "e", "a"]).labels == (" the", "e", "a")


def test_without_words_what_the_model_says(made: Made) -> None:
    """Without an answer a sweep asks for what either text makes the model say."""
    model = made("llama")
    texts = ("abcd", "dcba")
    said = [int(model.logits(model.tokenizer.encode(text))[0, -1].argmax()) for text in texts]  # type: ignore[union-attr]
    if said[0] == said[1]:
        with pytest.raises(RequestError, match="which words"):
            model.inside.patch_sweep(*texts)
    else:
        assert model.inside.patch_sweep(*texts).clean > 0 > model.inside.patch_sweep(*texts).corrupt
    with pytest.raises(RequestError, match="which words"):
        model.inside.patch_sweep(TEXT, TEXT)


def test_a_word_is_one_token(made: Made) -> None:
    inside = made("llama").inside
    with pytest.raises(RequestError, match="is not one token") as caught:
        inside.neighbours("end")
    assert caught.value.got == "3: 'e' + 'n' + 'd'"
    with pytest.raises(RequestError, match="is not one token") as caught:
        inside.neighbours("the")
    assert "With a space before it, it is one: ' the'" in str(caught.value.hint)
    with pytest.raises(RequestError):
        inside.neighbours("")
    with pytest.raises(RequestError):
        inside.neighbours(10**9)


def test_texts_of_two_lengths_are_shown_side_by_side(made: Made) -> None:
    """Where they part, and a way out where there is one; aligned from the end they are patched as ids are."""
    model = made("llama")
    inside, tokenizer = model.inside, model.tokenizer
    assert tokenizer is not None
    for ask, way in (
        (inside.patch_sweep, True),
        (inside.path_sweep, False),
        (lambda a, b: inside.attribution_patching(a, b, ["*.attn.z"]), False),
    ):
        with pytest.raises(RequestError, match="as many tokens") as caught:
            ask(TEXT, "the bend")
        assert (caught.value.expected, caught.value.got) == ("6: t|he| |[]|e|n|d", "7: t|he| |[b]|e|n|d")
        assert "From token 3 on: “” beside “b”." in str(caught.value.hint)
        assert ('align="end"' in str(caught.value.hint)) is way
    found = inside.patch_sweep(TEXT, "the bend", "a", "b", align="end")
    one, two = (tokenizer.encode(text) for text in (TEXT, "the bend"))
    metric = inspection.logit_difference(*(tokenizer.encode(word)[0] for word in ("a", "b")))
    same(found, inspection.patch_sweep(model.transformer, [one], [two], metric, align="end"))
    assert TEXT.endswith("".join(found.columns))


def test_the_only_blank_is_asked_about(made: Made) -> None:
    model = made("mlm")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode_masked("the [MASK] sat")
    place = ids.index(tokenizer.mask_id)
    best = int(model.logits(ids)[0, place].argmax())
    same(model.inside.saliency("the [MASK] sat"), inspection.saliency(model.transformer, ids, best, position=place))
    assert model.inside.effect("the [MASK] sat", {"encoder.layers.0.attn.z": edits.zero()}).position == place
    with pytest.raises(RequestError, match="which token"):
        model.inside.saliency("the cat sat")


def test_labels(made: Made) -> None:
    model = made("labels")
    found = model.inside.saliency("the cat sat", "shipping")
    ids = model.tokenizer.encode("the cat sat")  # type: ignore[union-attr]
    same(found, inspection.saliency(model.transformer, ids, "shipping"))
    assert "shipping" in found.what
    effect = model.inside.effect("the cat", {"encoder.layers.*.attn.z": edits.zero(heads=0)}, k=2)
    assert effect.position is None
    assert {*effect.words} <= {"billing", "shipping", "ret\x1b[31murns"}


def test_no_head(made: Made) -> None:
    inside = made("bare").inside
    with pytest.raises(RequestError, match="scores nothing"):
        inside.decompose("the cat")
    with pytest.raises(RequestError):
        inside.lens("the cat")
    assert inside.neurons("the cat", by_size=True, k=3).what == "size"
    assert inside.head_scores("the cat the cat").scores["duplicate"].isfinite().any()


def test_a_source_and_a_target(made: Made) -> None:
    model = made("t5")
    inside, tokenizer = model.inside, model.tokenizer
    assert tokenizer is not None
    source, target = tokenizer.encode(TEXT), [*model._voice.start(), *tokenizer.encode("a", bos=False)]
    same(inside.lens(TEXT, target="a"), inspection.lens(model.transformer, target, source=source))
    found = inside.attention(TEXT, "decoder.layers.0.cross", target="a")
    kept = model.trace(TEXT, "decoder.layers.0.cross.weights", target=[target])
    torch.testing.assert_close(found.weights, kept["decoder.layers.0.cross.weights"][0], rtol=0, atol=0)
    assert (found.pieces[1:], "".join(found.keys)) == (("a",), TEXT)
    assert inside.attention(TEXT, "encoder.layers.0.attn").keys == found.keys
    swept = inside.patch_sweep(TEXT, "the bnd", "a", "b", stack="encoder")
    assert "".join(swept.columns) == TEXT
    assert inside.head_scores(TEXT, target="ab").layers[0] == "encoder.layers.0.attn"
    assert inside.neurons(TEXT, k=2).branches[0].startswith("decoder.layers.")
    assert inside.occlusion(TEXT, "a").source_pieces == found.keys
    with pytest.raises(RequestError, match="two tokens or more"):
        inside.head_scores(TEXT)
    assert inside.head_scores().scores["induction"].isfinite().any()
    with pytest.raises(RequestError, match="one text"):
        made("llama").inside.lens(TEXT, target="a")


def test_a_trace_of_words_is_the_models_own(made: Made) -> None:
    """``inside.trace`` hands on to what ``model.trace`` does: edits, steps of an answer, a target in words."""
    names = ("decoder.layers.*.attn.z", "decoder.layers.0.attn.weights", "logits")
    for kind, target in (("llama", None), ("t5", "a")):
        model = made(kind)
        more: dict[str, Any] = {"edits": {"decoder.layers.0.attn.z": edits.scale(0.5)}, "max_tokens": 2}
        ids = None
        if target is not None:
            assert model.tokenizer is not None
            ids = [[*model._voice.start(), *model.tokenizer.encode(target, bos=False)]]
        one, two = (
            model.inside.trace(TEXT, *names, target=target, **more),
            model.trace(TEXT, *names, target=ids, **more),
        )
        assert (one.tokens, one.sources, one.pieces) == (two.tokens, two.sources, two.pieces)
        assert [*one] == [*two]
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert not torch.equal(one["logits"], model.trace(TEXT, "logits", target=ids, max_tokens=2)["logits"])
    kept = made("mlm").inside.trace("the [MASK] sat", "logits")
    assert made("mlm").tokenizer.mask_id in kept.tokens[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["llama", "mlm", "t5"])
def test_a_text_without_a_token(made: Made, kind: str) -> None:
    """It does not become a start token, or what stands around a text, in silence."""
    inside = made(kind).inside
    for text in ("", *([" ", "\n "] if kind == "mlm" else [])):
        for ask in (
            lambda text=text: inside.attention(text, next(iter(inside._model.spec.stacks)) + ".layers.0.attn"),
            lambda text=text: inside.trace(text, "logits"),
            lambda text=text: inside.compare("a", text),
            lambda text=text: inside.head_scores([text]),
        ):
            with pytest.raises(RequestError, match="nothing to look at") as caught:
                ask()
            assert caught.value.got == repr(text)
            assert (caught.value.field or "").startswith(("text", "other"))
    if kind == "mlm":
        assert len(inside.trace("[MASK]", "logits").tokens[0]) == 3
    if kind == "llama":
        assert inside.trace([1], "logits").tokens == [[1]]


def test_neurons_are_those_of_the_decomposition(made: Made) -> None:
    model = made("llama")
    ids = model.tokenizer.encode(TEXT)  # type: ignore[union-attr]
    best = int(model.logits(ids)[0, -1].argmax())
    whole = inspection.decompose(model.transformer, ids, best, neurons=["*.mlp"])
    every = {(name, i): float(v) for name, values in whole.neurons.items() for i, v in enumerate(values)}
    found = model.inside.neurons(TEXT, k=6)
    wanted = sorted(every, key=lambda key: -abs(every[key]))[:6]
    assert [*zip(found.branches, found.neurons, strict=True)] == wanted
    assert found.values == pytest.approx([every[key] for key in wanted], rel=1e-4)
    act = model.trace(TEXT, f"{found.branches[0]}.act")[f"{found.branches[0]}.act"][0, -1, found.neurons[0]]
    assert found.acts[0] == pytest.approx(float(act), rel=1e-5)
    with pytest.raises(RequestError, match="no such layer"):
        model.inside.neurons(TEXT, layers=[9])


def test_an_effect_is_the_edited_answer(made: Made) -> None:
    model = made("llama")
    change = {"decoder.layers.1.attn.z": edits.zero(heads=1), "decoder.layers.2.mlp.out": edits.scale(0.5)}
    found = model.inside.effect(TEXT, change, k=3, also=[" the"])
    runs = [model.trace(TEXT, "logits", edits=some)["logits"][0, -1] for some in (None, change)]
    plain, edited = (run.log_softmax(-1) for run in runs)
    assert found.before == pytest.approx(plain[list(found.tokens)].tolist())
    assert found.after == pytest.approx(edited[list(found.tokens)].tolist())
    assert found.tokens[:3] == tuple(plain.topk(3).indices.tolist())
    assert " the" in found.words
    assert found.divergence == pytest.approx(float((plain.exp() * (plain - edited)).sum()), abs=1e-6)


def test_rewritten_models_say_the_same(made: Made) -> None:
    model = made("llama")
    folded = model.inside.fold_norms()
    assert isinstance(folded, Model)
    assert folded.tokenizer is model.tokenizer
    torch.testing.assert_close(folded.logits([1, 2, 3]), model.logits([1, 2, 3]), rtol=1e-4, atol=1e-4)
    centred = model.inside.centre_unembedding()
    assert float(centred.logits([1, 2, 3]).mean(-1).abs().max()) < 1e-4
    with pytest.raises(RequestError, match="RMSNorm"):
        model.inside.centre_writes()


def test_a_lens_is_trained_kept_and_read(made: Made, tmp_path: Path) -> None:
    inside = made("llama").inside
    tuned = inside.train_lens(["the end of the day", "a text", "another text, the last"], steps=1)
    tuned.save(tmp_path / "lens")
    again = inside.load_lens(tmp_path / "lens")
    same(inside.lens(TEXT, tuned=tuned), inside.lens(TEXT, tuned=again))
    with pytest.raises(NameNotFound):
        inside.attention(TEXT, 99)


def test_the_default_is_repeated_tokens(made: Made) -> None:
    """Ordinary ones, the second half as the first."""
    model = made("llama")
    rows = model.inside.repeated(8, 2)
    control = {*model.tokenizer.special.values()}  # type: ignore[union-attr]
    for row in rows:
        assert row[-8:] == row[-16:-8]
        assert not control & {*row}
    assert model.inside.ablation_sweep(rows, first=9).losses.shape == (3, 4)
