"""Encoders against transformers, a row for each family and head, and each option of a config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import cutaway
from cutaway.checkpoints.save import save_folder
from cutaway.errors import ContextExceeded
from cutaway.families import family_of
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import saved
from cutaway.inspection import Recorder
from cutaway.models import Transformer
from cutaway.models.head import Head, pooled
from cutaway.spec import ClassifierSpec, PoolerSpec
from cutaway.spec.names import axis_sizes, tap_names
from tests.reference import tiny
from tests.reference import tiny_encoders as encoders
from tests.reference.conftest import open_folder
from tests.reference.test_families import apart
from tests.reference.test_gradients import gradients, relative

Folders = Callable[[str], Path]
Note = Callable[[str, str, float], float]
WAYS = ("fused", "explicit", "blockwise")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A case's name to the folder that transformers wrote for it."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = encoders.write(encoders.config(name), tmp_path_factory.mktemp("encoders") / name)
        return made[name]

    return find


def per_text(model: Transformer) -> bool:
    """Whether the head says one thing of a text rather than one of each token."""
    head = model.spec.head
    return isinstance(head, PoolerSpec) or (isinstance(head, ClassifierSpec) and head.pooler is not None)


def answer(model: Transformer, hidden: Tensor, positions: Tensor) -> Tensor:
    """What the head makes of hidden states: the same as calling the model."""
    if model.head is None:
        return hidden
    return model.unembed(hidden) if isinstance(model.head, Head) else model.answer(hidden, positions)


@pytest.mark.parametrize("name", encoders.CASES)
@torch.no_grad()
def test_hidden_and_answer(name: str, folder_of: Folders, measured: Note) -> None:
    ids = tiny.ids(2, 40)
    types = encoders.types_for(name, ids)
    model, (hidden, said) = open_folder(folder_of(name)), encoders.lone(folder_of(name), ids, types)
    assert hidden.std() > 0.3
    assert said.abs().max() > 0.05
    assert measured(name, "hidden", apart(model.hidden(ids, types=types), hidden)) <= 1e-4
    assert measured(name, "logits", apart(model(ids, types=types), said)) <= 1e-4
    model.attention = "explicit"
    assert measured(name, "explicit", apart(model(ids, types=types), said)) <= 1e-4
    assert torch.equal(model.encode(ids, types=types), model.hidden(ids, types=types))


@pytest.mark.parametrize("name", encoders.CASES)
@torch.no_grad()
def test_padded_batches(name: str, folder_of: Folders, measured: Note) -> None:
    """Ragged texts in a batch, pads left, right or between, whatever ids stand there: each as if alone."""
    lengths, width = (40, 7, 23, 1), 40
    rows = [tiny.ids(1, n, seed=n) for n in lengths]
    alone = [encoders.lone(folder_of(name), row) for row in rows]
    model = open_folder(folder_of(name))
    for side in ("left", "right", "between"):
        ids, positions = tiny.ids(4, width, seed=9), torch.full((4, width), -1)
        places = []
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            start = 0 if side == "right" else width - n
            where = torch.arange(start, start + n)
            if side == "between":
                where = torch.linspace(0, width - 1, n).long() if n > 1 else torch.tensor([width // 2])
            ids[i, where], positions[i, where] = row[0], torch.arange(n)
            places.append(where)
        hidden = model.hidden(ids, positions)
        said = answer(model, hidden, positions)
        assert torch.equal(model(ids, positions), said)
        assert hidden.isfinite().all()
        for i, where in enumerate(places):
            one = said[i][None] if per_text(model) else said[i, where][None]
            assert measured(name, "padded", apart(hidden[i, where][None], alone[i][0])) <= 1e-4
            assert measured(name, "padded", apart(one, alone[i][1])) <= 1e-4


@pytest.mark.parametrize("name", [*encoders.FAMILIES, *(f"{family}-labels" for family in encoders.FAMILIES)])
@torch.no_grad()
def test_padded_as_transformers_pads(name: str, folder_of: Folders, measured: Note) -> None:
    """Its own batch with its own mask, pads at the right."""
    values, lengths = encoders.config(name), torch.tensor([[20], [9], [1]])
    steps = torch.arange(20).expand(3, -1)
    mask = steps < lengths
    ids = torch.where(mask, tiny.ids(3, 20), values["pad_token_id"])
    with torch.no_grad():
        hidden, said = encoders.answers(encoders.reference(folder_of(name)), ids, attention_mask=mask.long())
    model, positions = open_folder(folder_of(name)), torch.where(mask, steps, -1)
    assert measured(name, "padded", apart(model.hidden(ids, positions)[mask], hidden[mask])) <= 1e-4
    ours = model(ids, positions)
    ours, said = (ours, said) if per_text(model) else (ours[mask], said[mask])
    assert measured(name, "padded", apart(ours, said)) <= 1e-4


@pytest.mark.parametrize("name", [*encoders.ONE_EACH, "modernbert-odd-window"])
@torch.no_grad()
def test_packed_documents_do_not_meet(name: str, folder_of: Folders, measured: Note) -> None:
    """Case M04: documents in one row, told apart by segments, read as if alone."""
    lengths = (7, 5, 13)
    documents = [tiny.ids(1, n, seed=n) for n in lengths]
    alone = [encoders.lone(folder_of(name), document)[1] for document in documents]
    model = open_folder(folder_of(name))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    segments = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    for way in WAYS:
        model.attention = way
        packed = model(torch.cat(documents, 1), positions, segments)
        for part, document in zip(packed.split(lengths, 1), alone, strict=True):
            assert measured(name, "packed", apart(part, document)) <= 1e-4
        other = model(torch.cat([tiny.ids(1, 7, seed=99), *documents[1:]], 1), positions, segments)
        assert torch.equal(other[:, 7:], packed[:, 7:])


@pytest.mark.parametrize("name", encoders.CASES)
def test_gradients(name: str, folder_of: Folders, measured: Note) -> None:
    """Of hidden states and answer together, so that a pooler has its share too."""
    ids = tiny.ids(2, 24)
    types = encoders.types_for(name, ids)
    model, reference = open_folder(folder_of(name)), encoders.reference(folder_of(name))
    hidden, said = encoders.answers(reference, ids, **({} if types is None else {"token_type_ids": types}))
    theirs = gradients(reference, torch.cat([hidden.flatten(), said.flatten()]))
    usual = torch.stack([grad.norm() for grad in theirs.values()]).median()
    for way in WAYS:
        model.attention = way
        hidden = model.hidden(ids, types=types)
        said = answer(model, hidden, torch.arange(24).expand(2, -1))
        found = gradients(model, torch.cat([hidden.flatten(), said.flatten()]))
        ours = saved(family_of(model.spec.family).rules(model.spec), found)
        for grads in (ours, theirs):  # a key's bias moves all scores of a query alike: nothing comes of it but rounding
            noise = [key for key in grads if key.endswith((".key.bias", ".k_lin.bias"))]
            assert all(grads.pop(key).norm() <= 1e-5 * usual for key in noise)
        assert measured(name, "gradient", relative(ours, theirs)) <= 1e-4


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [*encoders.ONE_EACH, "modernbert-odd-window"])
def test_three_attentions(name: str, training: bool, folder_of: Folders, measured: Note) -> None:
    """Fused, explicit and blockwise agree forwards and backwards, with pads and packed documents."""
    values = encoders.config(name)
    values |= dict.fromkeys(DROPOUTS[values["model_type"]], 0.0)
    model = Transformer(tiny.spec_of(values)).train(training)
    tiny.scale_randomly(model, norm_mean=1.0)
    ids = tiny.ids(3, 20)
    positions = torch.arange(20).expand(3, -1).clone()
    positions[1, :6], positions[1, 6:] = -1, torch.arange(14)
    positions[2] = torch.cat([torch.arange(8), torch.arange(12)])
    segments = torch.zeros(3, 20, dtype=torch.long)
    segments[2, 8:] = 1
    results = []
    for way in WAYS:
        model.attention = way
        said = torch.where(positions[..., None] >= 0, model(ids, positions, segments), 0.0)
        results.append((said.detach(), gradients(model, said)))
    for said, back in results[1:]:
        assert measured(name, "two attentions", apart(said, results[0][0])) <= 1e-4
        assert relative(back, results[0][1]) <= 1e-4


# Every key that drops something, by family; the last is the classifier's own.
DROPOUTS = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    "roberta": ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    "distilbert": ("dropout", "attention_dropout", "seq_classif_dropout"),
    "modernbert": ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout"),
}


@pytest.mark.parametrize("kind", ["-mlm", "-labels", "-tokens"])
@pytest.mark.parametrize("family", DROPOUTS)
def test_each_dropout_is_where_transformers_has_it(family: str, kind: str, tmp_path: Path) -> None:
    """Dropping everything at one place draws nothing at random: both must then say the same."""
    ids = tiny.ids(2, 9)
    answers = []
    for key in DROPOUTS[family]:
        values = {**encoders.config(family + kind), **dict.fromkeys(DROPOUTS[family], 0.0), key: 1.0}
        folder = encoders.write(values, tmp_path / key)
        with torch.no_grad():
            hidden, said = encoders.answers(encoders.reference(folder).train(), ids)
            model = open_folder(folder).train()
            model.attention = "explicit"
            assert apart(model.hidden(ids), hidden) <= 1e-4
            assert apart(model(ids), said) <= 1e-4
            answers.append((apart(model.eval().hidden(ids), hidden), apart(model(ids), said)))
    shown = [max(pair) > 0.01 for pair in answers]
    own = {"-labels": True, "-tokens": family != "distilbert", "-mlm": False}[kind]
    assert shown == [True] * (len(shown) - 1) + [own]


@pytest.mark.parametrize("name", encoders.CASES)
def test_read_and_write_are_inverse(name: str) -> None:
    spec = tiny.spec_of(encoders.config(name))
    family = family_of(spec.family)
    assert family.read(ConfigReader(family.config(spec))) == spec


@pytest.mark.parametrize("name", encoders.CASES)
@torch.no_grad()
def test_saved_and_loaded(name: str, folder_of: Folders, tmp_path: Path, measured: Note) -> None:
    """What comes back is the same bits, for us and for transformers; in our own format too."""
    model, ids = open_folder(folder_of(name)), tiny.ids(1, 30)
    save_folder(model, tmp_path / "copy")
    save_folder(model, tmp_path / "own", own=True)
    again, own = open_folder(tmp_path / "copy"), open_folder(tmp_path / "own")
    assert again.spec == model.spec
    for other in (again, own):
        assert other.spec.head == model.spec.head
        assert other.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in other.state_dict().items())
        assert torch.equal(model(ids), other(ids))
    first, second = (load_file(folder / "model.safetensors") for folder in (folder_of(name), tmp_path / "copy"))
    # Untied, transformers stores a shift that it does not use beside the one that it does.
    assert first.keys() - second.keys() <= {"lm_head.bias", "cls.predictions.bias"}
    assert name.endswith("mlm-untied") or first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in second)
    hidden, said = encoders.lone(tmp_path / "copy", ids)
    assert measured(name, "saved", apart(model.hidden(ids), hidden)) <= 1e-4
    assert measured(name, "saved", apart(model(ids), said)) <= 1e-4


# ---- taps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*encoders.CASES])
@torch.no_grad()
def test_every_quantity(name: str) -> None:
    """Each name once, with its axes and meaning; an edit that changes nothing changes nothing."""
    model = Transformer(tiny.spec_of(encoders.config(name))).eval()
    tiny.scale_randomly(model, norm_mean=1.0)
    ids, positions = tiny.ids(2, 14), torch.arange(14).expand(2, -1).clone()
    positions[1, 9:] = -1
    names = tap_names(model.spec)
    recorder = Recorder(list(names))
    said = model(ids, positions, tap=recorder)
    assert [len(recorder.kept[key]) for key in names] == [1] * len(names)
    seen = {key: values[0] for key, values in recorder.kept.items()}
    for key, axes in names.items():
        sizes = {**axis_sizes(model.spec, key), "batch": 2, "query": 14, "key": 14}
        assert tuple(seen[key].shape) == tuple(sizes[word] for word in axes), key
    assert apart(said, model(ids, positions)) <= 1e-4
    same = model(ids, positions, tap=Recorder([], {key: [lambda x: x] for key in names}))
    assert torch.equal(same, said)

    stream, q, k = seen["embed.out"], positions[:, :, None], positions[:, None, :]
    for i, layer in enumerate(model.spec.encoder.layers):
        at = f"encoder.layers.{i}"
        assert torch.equal(seen[f"{at}.resid_in"], stream)
        window = layer.attention.mask.window or 1 << 40
        readable = (q >= 0) & (k >= 0) & ((q - k).abs() < window)
        weights = seen[f"{at}.attn.weights"]
        assert (weights.masked_select(~readable[:, None]) == 0).all()
        assert apart(weights.sum(-1), (q >= 0)[..., 0][:, None].float().expand(-1, weights.shape[1], -1)) <= 1e-5
        out = model.get_submodule(f"{at}.branches.attn.body.out")
        total = seen[f"{at}.attn.head_out"].sum(2) + (0 if out.bias is None else out.bias)
        assert apart(total, seen[f"{at}.attn.body"]) <= 1e-5
        for branch in ("attn", "mlp"):
            module = model.get_submodule(f"{at}.branches.{branch}")
            stream = seen[f"{at}.{branch}.resid"]
            before = seen[f"{at}.resid_in"] if branch == "attn" else seen[f"{at}.attn.resid"]
            assert apart(module.post_norm(before + seen[f"{at}.{branch}.out"]), stream) <= 1e-4
    assert apart(model.encoder.norm(stream), seen["encoder.norm.out"]) <= 1e-5
    if not isinstance(model.head, Head) and model.head is not None:
        assert apart(model.answer(seen["encoder.norm.out"], positions), said) <= 1e-5


# ---- configs ----------------------------------------------------------------------------------------------

# Every field of each family's config, away from its default.
COMMON = {
    "initializer_range": 0.5,
    "pad_token_id": 2,
    "bos_token_id": 9,
    "eos_token_id": [7, 3],
    "tie_word_embeddings": False,
    **encoders.labelled("sad", "glad", "mad", problem_type="multi_label_classification"),
}
BERTS = {
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.3,
    "classifier_dropout": 0.4,
    "layer_norm_eps": 1e-3,
    "type_vocab_size": 3,
    "use_cache": False,
}
ODD = {
    "bert": BERTS,
    "roberta": BERTS,
    "distilbert": {
        "activation": "relu",
        "dropout": 0.2,
        "attention_dropout": 0.3,
        "seq_classif_dropout": 0.4,
        "qa_dropout": 0.5,
        "sinusoidal_pos_embds": True,
    },
    "modernbert": {
        "rope_parameters": {
            tiny.FAR: {"rope_type": "linear", "rope_theta": 900.0, "factor": 4.0},
            tiny.NEAR: {"rope_type": "default", "rope_theta": 300.0},
        },
        "layer_types": [tiny.NEAR, tiny.FAR, tiny.NEAR],
        "local_attention": 7,
        "hidden_activation": "silu",
        "initializer_cutoff_factor": 3.0,
        "norm_eps": 1e-3,
        "norm_bias": True,
        "cls_token_id": 4,
        "sep_token_id": 5,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "embedding_dropout": 0.2,
        "mlp_bias": True,
        "mlp_dropout": 0.3,
        "decoder_bias": False,
        "classifier_pooling": "mean",
        "classifier_dropout": 0.4,
        "classifier_bias": True,
        "classifier_activation": "relu",
        "deterministic_flash_attn": True,
        "sparse_prediction": True,
        "sparse_pred_ignore_index": -1,
    },
}
# Fields that are about something else than this model's numbers, or have one value here.
ELSEWHERE = {
    "model_type", "architectures", "transformers_version", "dtype", "return_dict", "output_hidden_states",
    "is_encoder_decoder", "chunk_size_feed_forward", "_name_or_path", "add_cross_attention", "is_decoder",
    "output_attentions",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"])
@pytest.mark.parametrize("family", ODD)
@torch.no_grad()
def test_every_field_comes_back(family: str, kind: str, tmp_path: Path, measured: Note) -> None:
    """Case C13: no field is lost or changed on its way through, whatever head there is."""
    from transformers import AutoConfig

    name, values = encoders.FAMILIES[family]
    odd = {"model_type": family, "architectures": [name + kind], **values, **COMMON, **ODD[family]}
    folder = encoders.write(odd, tmp_path / "odd")
    plain = AutoConfig.for_model(family).to_dict()
    theirs = json.loads((folder / "config.json").read_text())
    assert not {key for key in plain if key not in ELSEWHERE and theirs.get(key) == plain[key]}, "left at its default"

    model = open_folder(folder)
    assert family_of(family).read(ConfigReader(family_of(family).config(model.spec))) == model.spec
    cutaway.save(cutaway.load(str(folder)), tmp_path / "copy")
    ours = json.loads((tmp_path / "copy" / "config.json").read_text())
    for one in (theirs, ours):
        one.pop("transformers_version", None)
    assert ours == theirs
    first, second = (AutoConfig.from_pretrained(place).to_dict() for place in (folder, tmp_path / "copy"))
    assert {**second, "_name_or_path": ""} == {**first, "_name_or_path": ""}
    again, ids = open_folder(tmp_path / "copy"), tiny.ids(1, 30)
    assert torch.equal(again(ids), model(ids))
    row = f"{family} (every field)"
    assert measured(row, "saved", apart(encoders.lone(tmp_path / "copy", ids)[1], model(ids))) <= 1e-4


# ---- single reports ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_positions_start_after_the_pad(tmp_path: Path, measured: Note) -> None:
    """Case L21: a table of 18 rows with pad id 1 reads 16 tokens, and says so."""
    values = {**encoders.config("roberta"), "max_position_embeddings": 18}
    folder = encoders.write(values, tmp_path / "roberta")
    model, ids = open_folder(folder), tiny.ids(1, 17)
    assert model.spec.position_limit == model.spec.max_positions == 16
    hidden, said = encoders.lone(folder, ids[:, :16])
    assert measured("roberta", "hidden", apart(model.hidden(ids[:, :16]), hidden)) <= 1e-4
    assert apart(model(ids[:, :16]), said) <= 1e-4
    with pytest.raises(ContextExceeded, match="positions below 16, got 16"):
        model(ids)
    with pytest.raises(ContextExceeded, match="16"):
        cutaway.load(str(folder)).hidden(ids)

    # A pad in the middle has no position, for transformers by its id and its mask.
    ids = ids[:, :12].clone()
    ids[0, 5] = values["pad_token_id"]
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, 5] = 0
    positions = torch.tensor([[0, 1, 2, 3, 4, -1, 5, 6, 7, 8, 9, 10]])
    hidden, said = encoders.answers(encoders.reference(folder), ids, attention_mask=mask)
    real = mask.bool()
    assert measured("roberta", "padded", apart(model.hidden(ids, positions)[real], hidden[real])) <= 1e-4
    assert apart(model(ids, positions), said) <= 1e-4
    assert apart(model.hidden(ids)[real], hidden[real]) > 0.1  # read as a token, it shows


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "modernbert-global"])
@torch.no_grad()
def test_a_vector_does_not_depend_on_its_neighbours(name: str, folder_of: Folders, measured: Note) -> None:
    """Case M06: pooled over a text's own tokens, beside one of another length, whichever side the pads are on."""
    values = encoders.config(name)
    model = Transformer(tiny.spec_of({**values, "max_position_embeddings": 64})).eval()
    tiny.scale_randomly(model, norm_mean=1.0)
    short, long = tiny.ids(1, 5, seed=1), tiny.ids(1, 60, seed=2)
    alone = model.hidden(short)
    steps = torch.arange(5)[None]
    last = {"first": alone[:, 0], "last": alone[:, -1], "mean": alone.mean(1), "max": alone.amax(1)}
    for side in ("left", "right"):
        ids, positions = tiny.ids(2, 60, seed=3), torch.full((2, 60), -1)
        where = slice(0, 5) if side == "right" else slice(55, 60)
        ids[0, where], positions[0, where] = short[0], steps[0]
        ids[1], positions[1] = long[0], torch.arange(60)
        hidden = model.hidden(ids, positions)
        for pool, wanted in last.items():
            assert torch.equal(pooled(alone, steps, pool), wanted)
            assert apart(pooled(hidden, positions, pool)[:1], wanted) <= 1e-5
        spoiled = torch.where(positions[..., None] >= 0, hidden, float("nan"))
        assert all(pooled(spoiled, positions, pool).isfinite().all() for pool in last)
        if per_text(model):
            assert apart(model(ids, positions)[:1], model(short)) <= 1e-5
