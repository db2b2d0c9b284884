"""sentence-transformers, or ONNX Runtime with the same tokenizer, mean and length: texts to vectors."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from stage import THREADS, outlet, play

out = outlet()
words = json.loads(sys.argv[1])
encode: Any
if words["how"] == "sentence-transformers":
    import sentence_transformers
    import torch

    torch.set_num_threads(THREADS)
    model = sentence_transformers.SentenceTransformer(words["path"], device="cpu")
    version = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"

    def encode(texts: list[str], batch: int) -> Any:
        """It sorts by length itself."""
        return model.encode(texts, batch_size=batch)

else:
    import numpy as np
    import onnxruntime

    from tokenizers import Tokenizer

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = THREADS, 1
    session = onnxruntime.InferenceSession(words["onnx"], settings, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(f"{words['path']}/tokenizer.json")
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    version = f"onnxruntime {onnxruntime.__version__}"

    def encode(texts: list[str], batch: int) -> Any:
        """Like lengths together, as sentence-transformers has them."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = np.empty((len(texts), 384), dtype=np.float32)
        for at in range(0, len(order), batch):
            rows = order[at : at + batch]
            read = tokenizer.encode_batch([texts[i] for i in rows])
            ids = np.array([one.ids for one in read])
            mask = np.array([one.attention_mask for one in read])
            given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            (hidden,) = session.run(None, given)
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors[rows] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return vectors


def embed(texts: list[str], batch: int) -> dict[str, Any]:
    """Vectors of texts."""
    began = time.perf_counter()
    vectors = encode(texts, batch)
    return {"seconds": time.perf_counter() - began, "vectors": vectors[:64].tolist()}


play({"version": version}, {"embed": embed}, out)
