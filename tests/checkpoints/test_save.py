"""Giving a model back: whole files, also over the folder it came from (case C12)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.reference import tiny

from cutaway.checkpoints.load import Checkpoint, load_checkpoint
from cutaway.checkpoints.resolve import Resolved
from cutaway.checkpoints.save import COMPANIONS, save_folder
from cutaway.errors import ConfigError, ShardError, StorageError
from cutaway.spec import FactorScaling

REPOSITORY = Path(__file__).parents[2]


def load(folder: Path, **options: object) -> Checkpoint:
    return load_checkpoint(Resolved("folder", folder, ""), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mmap", [False, True])
def test_over_the_folder_it_came_from(mmap: bool, tmp_path: Path) -> None:
    """One tensor changed; those that were loaded stay what they are."""
    save_folder(tiny.transformer("llama"), tmp_path)
    checkpoint = load(tmp_path, mmap=mmap)
    model = checkpoint.transformer
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.decoder.norm.weight.fill_(3.0)
    save_folder(model, tmp_path, checkpoint)
    for name, tensor in load(tmp_path).transformer.state_dict().items():
        assert torch.equal(tensor, torch.full((32,), 3.0) if name == "decoder.norm.weight" else before[name])
        assert torch.equal(tensor, model.state_dict()[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """Before any of the renames and syncs: the folder is the old model, the new one, or says that it is neither."""
    old, new = tiny.transformer("llama", seed=0), tiny.transformer("llama", seed=1)
    save_folder(old, tmp_path / "m")
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        from pathlib import Path
        from tests.reference import tiny
        from cutaway.checkpoints.save import save_folder
        model = tiny.transformer("llama", seed=1)
        left = int(sys.argv[1])
        def counted(real):
            def call(*args, **kwargs):
                global left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)
            return call
        for name in ("replace", "fsync", "unlink", "chmod"):
            setattr(os, name, counted(getattr(os, name)))
        for n in range(left, -1, -1):
            pid = os.fork()
            if pid == 0:
                left = n
                save_folder(model, Path({str(tmp_path / "m")!r}))
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            print(n, os.WTERMSIG(status), flush=True)
            sys.stdin.readline()
    """
    wanted = [model.state_dict() for model in (old, new)]
    killed = unfinished = 0
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), "24"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        for line in run.stdout:
            killed += line.split()[1] == str(int(signal.SIGKILL))
            try:
                there = load(tmp_path / "m").transformer.state_dict()
                assert any(all(torch.equal(there[name], state[name]) for name in state) for state in wanted)
            except ShardError:
                unfinished += 1
            save_folder(old, tmp_path / "m")
            run.stdin.write("\n")
            run.stdin.flush()
    assert run.returncode == 0
    assert killed >= 4
    assert 0 < unfinished < killed


def test_what_travels_along(tmp_path: Path) -> None:
    """The tokenizer's files and the generation defaults, byte for byte; nothing else."""
    save_folder(tiny.transformer("llama"), tmp_path / "a")
    for name in COMPANIONS:
        (tmp_path / "a" / name).write_text("{}")
    (tmp_path / "a" / "tokenizer.json").write_bytes(b'{"x":  1}\n')
    (tmp_path / "a" / "modeling_x.py").write_text("raise SystemExit")
    checkpoint = load(tmp_path / "a")
    save_folder(checkpoint.transformer, tmp_path / "b" / "deeper", checkpoint)
    names = {path.name for path in (tmp_path / "b" / "deeper").iterdir()}
    assert names == {*COMPANIONS, "config.json", "model.safetensors"}
    assert (tmp_path / "b" / "deeper" / "tokenizer.json").read_bytes() == b'{"x":  1}\n'


def test_dtype_is_what_the_weights_are(tmp_path: Path) -> None:
    save_folder(tiny.transformer("qwen3").bfloat16(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    save_folder(load(tmp_path).transformer, tmp_path)  # a CPU computes in fp32, and saves what it has
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_a_tied_head_is_not_stored_twice(tmp_path: Path) -> None:
    save_folder(tiny.transformer("llama-tied"), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_what_a_config_cannot_say(tmp_path: Path) -> None:
    """A GGUF's list of frequency factors: refused before anything is written."""
    from dataclasses import replace

    model = tiny.transformer("llama")
    layers = tuple(
        replace(
            layer,
            branches=tuple(
                replace(b, body=replace(b.body, rotary=replace(b.body.rotary, scaling=FactorScaling((1.0,) * 4))))
                if b.name == "attn"
                else b
                for b in layer.branches
            ),
        )
        for layer in model.spec.decoder.layers
    )
    model.spec = replace(model.spec, decoder=replace(model.spec.decoder, layers=layers))
    with pytest.raises(ConfigError, match="rotary factors"):
        save_folder(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_where_one_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "m", tmp_path / "a\0b"):
        with pytest.raises(StorageError):
            save_folder(tiny.transformer("llama"), folder)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").mkdir()
    with pytest.raises(StorageError):
        save_folder(tiny.transformer("llama"), tmp_path / "m")


def test_saved_files_are_quiet(tmp_path: Path) -> None:
    """No warning on the way out or in, and readable by others as the umask says."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_folder(tiny.transformer("gemma3"), tmp_path)
        load(tmp_path)
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}
