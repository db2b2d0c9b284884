"""Which model it was: what a file says of the one that made it, and where another differs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import torch
from torch import Tensor

from cutaway.errors import CutawayError
from cutaway.formats.files import StrPath, parse_json
from cutaway.kernels import rounds
from cutaway.models import Transformer
from cutaway.spec.serial import difference, spec_from_json, spec_to_json
from cutaway.tokenizers.tokenizer import Tokenizer

SAMPLES = 64  # numbers of each weight that its hash is of
LARGEST_SPEC = 1 << 24  # bytes


def model_facts(model: Transformer) -> dict[str, str]:
    """Its spec as JSON, the type of its numbers and a hash of its weights, in the order in which they are compared."""
    return {
        "spec": json.dumps(spec_to_json(model.spec), sort_keys=True),
        "dtype": str(model.dtype),
        "weights": _weights(model),
    }


def spec_difference(path: StrPath, mine: str, theirs: str) -> tuple[str, str, str] | None:
    """The first place where two specs that are JSON differ, and what stands there; None where they mean the same.

    Raises:
        FormatError, ConfigError: the file has no spec there.
    """
    values = [parse_json(text.encode(), path=path, limit=LARGEST_SPEC) for text in (mine, theirs)]
    try:
        one, two = (replace(spec_from_json(value), kept=()) for value in values)
    except CutawayError as error:
        raise error.at(path) from error
    found = difference(one, two)
    return None if found is None else (f"spec{found[0]}", repr(found[1]), repr(found[2]))


def tokenizer_hash(tokenizer: Tokenizer | None) -> str:
    """A hash of a vocabulary, its pipeline, its template, and of the one for what is written if that is another."""
    found = hashlib.sha256()
    for one in () if tokenizer is None else dict.fromkeys((tokenizer, tokenizer.target)):
        template = "" if one.chat_template is None else one.chat_template.source
        facts = [template, sorted(one.special.items()), sorted(one.names.items()), one.bos_id, one.tidies]
        found.update(one.backend.to_str().encode() + json.dumps(facts).encode())
    return found.hexdigest()


def put(into: hashlib._Hash, name: str, tensor: Tensor, shape: list[int]) -> None:
    """Add a tensor to a hash."""
    into.update(json.dumps([name, str(tensor.dtype), shape]).encode())
    if tensor.numel():
        into.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _weights(model: Transformer) -> str:
    """A hash of each weight's name, shape, type and some of its values, the first and the last among them."""
    found = hashlib.sha256(b"int8" if rounds(model) else b"")  # which computes other numbers with the same weights
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        places = torch.linspace(0, max(len(flat) - 1, 0), min(SAMPLES, len(flat)), dtype=torch.float64).long()
        put(found, name, flat[places.to(flat.device)].cpu(), [*weight.shape])
    return found.hexdigest()
