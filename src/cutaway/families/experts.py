"""Experts in configs and files: what Mixtral and Qwen3-MoE have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutaway.errors import ConfigError
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Stack, WeightRule, rename
from cutaway.spec import ModelSpec, MoeSpec

MOST_EXPERTS = 4096
# What the training loss adds for balance, which is no part of the model.
KEPT = ("output_router_logits", "router_aux_loss_coef")


def read_counts(c: ConfigReader, n_experts: int, top_k: int) -> tuple[int, int]:
    """Experts, under either of their two names, and how many of them a token goes to.

    Args:
        c: the config.
        n_experts, top_k: the family's defaults.
    """
    c.keep(*KEPT)
    stated = {key: c.integer(key, None, high=MOST_EXPERTS) for key in ("num_local_experts", "num_experts")}
    counts = {n for n in stated.values() if n is not None} or {n_experts}
    if len(counts) > 1:
        wanted, got = stated.values()
        raise c.error("num_experts", "differs from num_local_experts", expected=wanted, got=got)
    if stated["num_experts"] is not None:  # given back beside the other: older programs know no other name
        c.keep("num_experts")
    n = counts.pop()
    k = c.integer("num_experts_per_tok", top_k)
    if k > n:
        raise c.error("num_experts_per_tok", "more than there are experts", expected=f"at most {n}", got=k)
    return n, k


def expert_rules(spec: ModelSpec, at: str, gate: str, up: str, down: str) -> list[WeightRule]:
    """The router and the experts of each layer that has them: a stored tensor for each expert, one of ours for all.

    Args:
        spec: whose tensors.
        at: the name of the whole in a layer.
        gate, up, down: the names within an expert.
    """
    rules: list[WeightRule] = []
    for i, layer in enumerate(spec.decoder.layers):
        for branch in layer.branches:
            if isinstance(branch.body, MoeSpec):
                ours, theirs = f"decoder.layers.{i}.branches.{branch.name}.body", f"model.layers.{i}.{at}"
                names = {"up": up, "down": down, **({"gate": gate} if branch.body.expert.gated else {})}
                rules.append(rename(f"{ours}.router.weight", f"{theirs}.gate.weight"))
                for part, name in names.items():
                    each = (f"{theirs}.experts.{e}.{name}.weight" for e in range(branch.body.n_experts))
                    rules.append(Stack((f"{ours}.{part}",), tuple(each)))
    return rules


# How a GGUF calls the two counts.
GGUF_COUNTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}


def gguf_counts(config: Mapping[str, Any], arch: str, counts: Mapping[str, str] = GGUF_COUNTS) -> None:
    """Refuse a GGUF's config that leaves a count to a default, which is this program's and not the file's.

    Raises:
        ConfigError: one is missing.
    """
    for word, name in counts.items():
        if config.get(name) is None:
            raise ConfigError("missing", field=f"{arch}.{word}", expected="an int", got=None)


def first_experts(spec: ModelSpec) -> MoeSpec | None:
    """The first layer's experts, which the others repeat; None where there are none."""
    bodies = (branch.body for layer in spec.decoder.layers for branch in layer.branches)
    return next((body for body in bodies if isinstance(body, MoeSpec)), None)
