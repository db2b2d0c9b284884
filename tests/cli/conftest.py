"""A tiny model with a tokenizer, as a folder and as a GGUF, and a way to call the command line in this process."""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenizers
from cutaway.checkpoints.save import save_folder
from cutaway.cli.group import invoke
from cutaway.families import family_of
from cutaway.formats.gguf_names import gguf_rules
from cutaway.formats.rules import saved
from cutaway.tokenizers.spelling import byte_alphabet
from tests.reference import tiny
from tokenizers import AddedToken, decoders, models, pre_tokenizers

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]


@dataclass(frozen=True)
class Outcome:
    """What a command line left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err)["error"]


def vocabulary() -> dict[str, int]:
    words = [*SPECIAL, *byte_alphabet(), *("".join(pair) for pair in MERGES)]
    return {word: index for index, word in enumerate(words)}


def config(**changes: Any) -> dict[str, Any]:
    vocab = vocabulary()
    ends = {"bos_token_id": vocab["<|end|>"], "eos_token_id": vocab["<|end|>"], "pad_token_id": None}
    return {**tiny.config("llama"), "vocab_size": len(vocab), **ends, **changes}


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary(), merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|end|>", "eos_token": "<|end|>", "add_bos_token": False}
    settings |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_folder(folder: Path, values: dict[str, Any], template: str | None = TEMPLATE) -> Path:
    save_folder(tiny.transformer(values), folder)
    write_tokenizer(folder, template)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers with a chat template."""
    return write_folder(tmp_path_factory.mktemp("cli") / "tiny", config())


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a table of 64 positions and no chat template."""
    vocab = len(vocabulary())
    values = {**tiny.config("gpt2"), "vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 0}
    return write_folder(tmp_path_factory.mktemp("cli") / "base", values, template=None)


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF with tied output, two kinds of numbers, and one layer stored unlike the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gguf import GGMLQuantizationType, GGUFWriter
        from gguf.quants import quantize
    values = config(tie_word_embeddings=True, **tiny._rope("default", 10_000.0))
    model = tiny.transformer(values)
    family = family_of("llama")
    assert family.gguf is not None
    own = model.state_dict()
    tensors = saved(gguf_rules(model.spec, list(own), family.gguf.alter(model.spec)), own)
    path = tmp_path_factory.mktemp("cli") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(values["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(vocabulary()))
    writer.add_token_types([3 if word in SPECIAL else 1 for word in vocabulary()])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        kind = GGMLQuantizationType.Q8_0 if tensor.dim() > 1 and "blk.2." not in name else GGMLQuantizationType.F32
        data = tensor.numpy() if kind is GGMLQuantizationType.F32 else quantize(tensor.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=None if kind is GGMLQuantizationType.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a command line here: 80 columns, no terminal, a home of its own."""
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def run(*arguments: object, stdin: bytes = b"", stdin_tty: bool = False, stdout_tty: bool = False) -> Outcome:
        stream = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        monkeypatch.setattr(stream, "isatty", lambda: stdin_tty, raising=False)
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: stdout_tty, raising=False)
        capsys.readouterr()
        with torch.random.fork_rng():
            code = invoke([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run
