"""The reference: transformers on the CPU, in fp32, with its plain attention."""

from __future__ import annotations

import copy
import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _pristine(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    # Falcon's plain attention adds ALiBi twice, once with the mask; its other one does not.
    values = json.loads((folder / "config.json").read_text())
    how = "sdpa" if values["model_type"] == "falcon" and values["alibi"] else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=how, dtype=torch.float32)
    return model.eval()


def fresh(folder: Path) -> Any:
    """An instance that nobody has called yet: some of transformers' rotary tables change with what they saw."""
    return copy.deepcopy(_pristine(folder))


def use_attention_cap(patch: Any) -> None:
    """Make Gemma 3 obey its config's ``attn_logit_softcapping``.

    transformers 5.24 reads the setting and has the capped attention, but does not pass the one to the other.
    """
    from transformers.models.gemma3 import modeling_gemma3 as gemma3

    plain = gemma3.eager_attention_forward

    def capped(module: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(module, *args, softcap=module.attn_logit_softcapping, **kwargs)

    patch.setattr(gemma3, "eager_attention_forward", capped)


def use_mpt_settings(patch: Any) -> None:
    """Make MPT obey its config's ``logit_scale``, ``expansion_ratio`` and ``alibi_bias_max``.

    transformers 5.24 has them in its config and documents them, and the model reads none of them.
    """
    from transformers.models.mpt import modeling_mpt as mpt

    make_mlp, make_model = mpt.MptMLP.__init__, mpt.MptForCausalLM.__init__

    def with_ratio(self: Any, config: Any) -> None:
        make_mlp(self, config)
        width = config.expansion_ratio * config.hidden_size
        self.up_proj = torch.nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = torch.nn.Linear(width, config.hidden_size, bias=False)

    def with_scale(self: Any, config: Any) -> None:
        make_model(self, config)
        scale = config.logit_scale
        scale = 1 / math.sqrt(config.d_model) if scale == "inv_sqrt_d_model" else scale
        if scale is not None:
            self.lm_head.register_forward_hook(lambda module, args, out: out * scale)

    def with_bias(self: Any, num_heads: int, sequence_length: int, device: Any = None) -> Tensor:
        bias_max = self.config.attn_config.alibi_bias_max
        return mpt.build_mpt_alibi_tensor(num_heads, sequence_length, bias_max, device)

    patch.setattr(mpt.MptModel, "build_mpt_alibi_tensor", with_bias)
    patch.setattr(mpt.MptMLP, "__init__", with_ratio)
    patch.setattr(mpt.MptForCausalLM, "__init__", with_scale)


@torch.no_grad()
def logits(folder: Path, ids: Tensor) -> Tensor:
    """Logits of whole texts without padding. [batch, n] → [batch, n, vocab]"""
    return fresh(folder)(input_ids=ids, use_cache=False).logits
