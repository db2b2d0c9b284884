"""Real GGUF files against the gguf package: every tensor bit for bit, and their sizes (P07)."""

from __future__ import annotations

from pathlib import Path

import gguf as oracle
import numpy as np
import pytest

from cutaway.formats.gguf import GgufFile

pytestmark = pytest.mark.real


@pytest.fixture(params=["smollm2_path", "gemma3_path"])
def path(request: pytest.FixtureRequest) -> Path:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Path)
    return found


def test_tensors_and_metadata_equal_the_reference(path: Path) -> None:
    reader = oracle.GGUFReader(path)
    with GgufFile(path) as file:
        assert file.names() == [one.name for one in reader.tensors]
        for one in reader.tensors:
            got = file.read(one.name).numpy()
            want = np.ascontiguousarray(oracle.dequantize(one.data, one.tensor_type)).reshape(got.shape)
            assert got.shape == tuple(int(n) for n in reversed(one.shape))
            assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), one.name
        fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for key, field in fields.items():
            value = file.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key


def test_p07_bits_per_weight(smollm2_path: Path, gemma3_path: Path) -> None:
    for path, nbytes, bits in ((gemma3_path, 246_587_904, 7.36), (smollm2_path, 96_576_768, 5.74)):
        with GgufFile(path) as file:
            assert sum(tensor.nbytes for tensor in file.tensors.values()) == nbytes
            assert 8 * nbytes / sum(tensor.numel for tensor in file.tensors.values()) == pytest.approx(bits, abs=0.005)


def test_the_vocabulary_of_gemma_is_whole(gemma3_path: Path) -> None:
    with GgufFile(gemma3_path) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        assert len(tokens) == 262_144
        assert file.type_of("tokenizer.ggml.tokens") == "arr[str]"
        assert file.type_of("tokenizer.ggml.scores") == "arr[f32]"
        assert file.metadata["general.architecture"] == "gemma3"
