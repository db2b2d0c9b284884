"""The reference: transformers on the CPU, in fp32, with its plain attention."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _pristine(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
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


@torch.no_grad()
def logits(folder: Path, ids: Tensor) -> Tensor:
    """Logits of whole texts without padding. [batch, n] → [batch, n, vocab]"""
    return fresh(folder)(input_ids=ids, use_cache=False).logits
