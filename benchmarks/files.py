"""The files that are measured on, each made once of those that are here, outside the checkout.

python -m benchmarks.files [NAME …]      q8_0 q4_0 f16 f32 hf ct2-int8 ct2-float32 onnx

The Q4_1 file of SmolLM2-135M is dequantised and written again by the ``gguf`` package, so that neither side wrote it.
CUTAWAY_TEST_MODELS says where the originals are (`make models`), CUTAWAY_BENCH_FILES where the others go.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.contest import HERE, environment, peers

ORIGINALS = {"q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma": "gemma-3-270m-q4_k_m.gguf", "minilm": "minilm"}
MADE = {
    **{kind: f"SmolLM2-135M-Instruct.{kind.upper()}.gguf" for kind in ("q8_0", "q4_0", "f16", "f32")},
    "hf": "SmolLM2-135M-Instruct",
    "ct2-int8": "SmolLM2-135M-Instruct-ct2-int8",
    "ct2-float32": "SmolLM2-135M-Instruct-ct2-float32",
    "onnx": "minilm.onnx",
}


def cache() -> Path:
    """Where cutaway keeps files."""
    home, base = os.environ.get("CUTAWAY_HOME"), os.environ.get("XDG_CACHE_HOME")
    return Path(home) if home else (Path(base) if base else Path.home() / ".cache") / "cutaway"


def folder() -> Path:
    """Where the made files are."""
    return Path(os.environ.get("CUTAWAY_BENCH_FILES") or cache() / "bench")


def file(name: str) -> Path:
    """One of them, made if need be, whole or not at all.

    Raises:
        SystemExit: an original is not here.
    """
    if name in ORIGINALS:
        path = Path(os.environ.get("CUTAWAY_TEST_MODELS") or cache() / "models") / ORIGINALS[name]
        if not path.exists():
            raise SystemExit(f"{path} is not here: `make models` gets it, or CUTAWAY_TEST_MODELS says where it is")
        return path.resolve()
    path = folder() / MADE[name]
    if not path.exists():
        print(f"making {path}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"part-{os.getpid()}-{path.name}")
        try:
            _make(name, part)
            part.rename(path)
        finally:
            if part.is_dir():
                shutil.rmtree(part)
            part.unlink(missing_ok=True)
    return path


def _make(name: str, part: Path) -> None:
    if name == "hf":
        import cutaway

        cutaway.save(cutaway.load(file("q4_1"), dtype="float32"), part)
    elif name == "onnx":
        _convert("onnx", file("minilm"), part)
    elif name.startswith("ct2"):
        _convert(name, file("hf"), part)
    else:
        rewritten(file("q4_1"), part, name.upper())


def _convert(how: str, source: Path, part: Path) -> None:
    """By the peers' own converters, in their interpreter."""
    command = [peers(), str(HERE / "players" / "convert.py"), how, str(source), str(part)]
    subprocess.run(command, check=True, env=environment())


def rewritten(source: Path, path: Path, kind: str) -> None:
    """A GGUF with its matrices in another type; what has one axis stays F32."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    name = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, name)
    own = {"general.architecture", "general.file_type", "general.quantization_version"}
    for field in reader.fields.values():
        if field.name in own or field.name.startswith("GGUF."):
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), value_type, sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        target = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, target), raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MADE:
        print(file(wanted))
