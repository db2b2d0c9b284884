"""One vector for a text (Reimers & Gurevych 2019)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import RequestError
from cutaway.generation.checks import flag
from cutaway.models import Transformer
from cutaway.models.head import pooled
from cutaway.spec.sentence import SentenceSettings
from cutaway.tasks.batch import Encoded, passes
from cutaway.tokenizers.tokenizer import Tokenizer

POOLS = {"mean": "mean", "cls": "first", "last": "last", "max": "max"}


def embed(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    settings: SentenceSettings,
    *,
    pool: str | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
) -> Tensor:
    """A vector for each text. [len(texts), d_model], in fp32 on the CPU. See ``Model.embed``.

    Raises:
        RequestError: a pooling or prompt that there is not.
        ContextExceeded: a text longer than the model can read, where the checkpoint does not say to cut it.
    """
    how = settings.pool if pool is None else pool
    if not isinstance(how, str) or how not in POOLS:
        raise RequestError("unknown pooling", field="pool", expected=" or ".join(POOLS), got=how)
    unit = settings.normalize if normalize is None else flag("normalize", normalize)
    before = _prompt(settings, prompt)
    read = [(before + text).lower() if settings.lower else before + text for text in texts]
    rows = [row or [tokenizer.bos_id or 0] for row in tokenizer.encode_batch(read)]
    most = settings.max_length
    if most is not None and any(len(row) > most for row in rows):
        cut = sum(len(row) > most for row in rows)
        warnings.warn(f"{cut} of {len(rows)} texts are cut to the checkpoint's {most} tokens", stacklevel=3)
        after = list(tokenizer.around.after)
        rows = [row[: max(0, most - len(after))] + after if len(row) > most else row for row in rows]
    out = torch.empty(len(rows), model.spec.d_model)
    for some in passes(model, [Encoded(row) for row in rows]):
        vectors = pooled(some.hidden, some.positions.to(some.hidden.device), POOLS[how]).float()
        if unit:
            vectors = F.normalize(vectors, dim=-1)
        out[some.rows] = vectors.cpu()
    return out


def _prompt(settings: SentenceSettings, name: str | None) -> str:
    prompts = dict(settings.prompts)
    chosen = settings.default_prompt if name is None else name
    if chosen is None:
        return ""
    if chosen not in prompts:
        raise RequestError("no such prompt", field="prompt", expected=" or ".join(prompts) or None, got=chosen)
    return prompts[chosen]
