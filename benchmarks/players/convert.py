"""Other libraries' files of ours, made by their own converters.

python convert.py ct2-int8|ct2-float32|onnx SOURCE TARGET
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def ct2(source: str, target: str, kind: str) -> None:
    """CTranslate2's folder of a Hugging Face one."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(source).convert(target, quantization=kind)


def onnx(source: str, target: str) -> None:
    """An encoder of [batch, key] ids, mask and types, as ONNX."""
    import torch
    import transformers

    class Encoder(torch.nn.Module):
        """Its last states alone."""

        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModel.from_pretrained(source, attn_implementation="sdpa").eval()

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.model(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)[0]

    example = tuple(torch.ones(2, 9, dtype=torch.long) for _ in range(3))
    names = ["input_ids", "attention_mask", "token_type_ids"]
    batch, key = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("key", min=2, max=512)
    torch.onnx.export(
        Encoder(),
        example,
        target,
        input_names=names,
        output_names=["hidden"],
        dynamic_shapes={name: {0: batch, 1: key} for name in names},
        dynamo=True,
        external_data=False,
    )


if __name__ == "__main__":
    how, source, target = sys.argv[1:]
    if how == "onnx":
        onnx(source, target)
    else:
        ct2(source, target, how.removeprefix("ct2-"))
    assert Path(target).exists()
