"""What encoders' configs and tensors have in common: layers normed after each branch, and heads by architecture."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from cutaway.errors import UnsupportedModelError
from cutaway.families.common import Sizes, layer_rules, read_sizes
from cutaway.families.family import Stored
from cutaway.formats.config import ConfigReader
from cutaway.formats.rules import Drop, Tie, WeightRule, rename
from cutaway.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    ClassifierSpec,
    HeadSpec,
    MaskRule,
    MlpSpec,
    ModelSpec,
    NormSpec,
    PoolerSpec,
    TransformSpec,
)

BOTH_WAYS = MaskRule(causal=False)
MOST_LABELS = 1 << 20
NORMS = ("pre_norm", "out_norm", "post_norm")
LabelKind = Literal["single", "multi", "regression"]
PROBLEMS: dict[LabelKind, str] = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
# What a checkpoint is for, as the end of its class's name says.
Kind = Literal["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"]
KINDS: dict[str, Kind] = {
    "Model": "Model",
    "ForMaskedLM": "ForMaskedLM",
    "ForSequenceClassification": "ForSequenceClassification",
    "ForTokenClassification": "ForTokenClassification",
}


def read_kind(c: ConfigReader, name: str, kinds: dict[str, Kind] = KINDS) -> Kind:
    """What the checkpoint's ``architectures`` say it is for; without any, the bare model.

    Args:
        c: the config.
        name: how the family's class names begin.
        kinds: the ends that the family has.

    Raises:
        UnsupportedModelError: another class, by its name.
    """
    stated = c.raw("architectures", None)
    if stated is None or stated == []:
        return "Model"
    first = stated[0] if isinstance(stated, list) else stated
    known = {f"{name}{end}": kind for end, kind in kinds.items()}
    if not isinstance(first, str) or first not in known or (isinstance(stated, list) and len(stated) > 1):
        wanted = " or ".join(known)
        raise UnsupportedModelError(
            "no such model here", path=c.path, field="/architectures", expected=wanted, got=stated
        )
    return known[first]


def read_encoder_sizes(c: ConfigReader, max_positions: int) -> Sizes:
    """The sizes of an encoder whose heads are all alike and together as wide as the stream."""
    sizes = read_sizes(c, max_positions=max_positions)
    c.fixed("num_key_value_heads", (sizes.n_heads, None), None)
    c.fixed("head_dim", (sizes.d_model // sizes.n_heads, None), None)
    c.fixed("position_embedding_type", ("absolute",), "absolute")
    c.keep("num_key_value_heads", "head_dim", "position_embedding_type")
    return sizes


def post_norm_block(
    attention: AttentionSpec, mlp: MlpSpec, norm: NormSpec, *, cross: AttentionSpec | None = None, dropout: float = 0.0
) -> BlockSpec:
    """Attention, perhaps cross-attention, feed-forward, with a norm after each sum (Vaswani et al. 2017)."""
    bodies: dict[str, AttentionSpec | MlpSpec | None] = {"attn": attention, "cross": cross, "mlp": mlp}
    branches = (
        BranchSpec(name, body, post_norm=norm, dropout=dropout) for name, body in bodies.items() if body is not None
    )
    return BlockSpec(tuple(branches))


def read_labels(c: ConfigReader) -> tuple[tuple[str, ...], LabelKind]:
    """A classifier's labels in the order of their numbers, and how they exclude one another."""
    named = c.raw("id2label", None)
    count = c.integer("num_labels", None, high=MOST_LABELS)
    if named is None:
        labels = tuple(f"LABEL_{i}" for i in range(count or 2))
    else:
        if not isinstance(named, dict) or not named or not all(isinstance(text, str) for text in named.values()):
            raise c.error("id2label", "not the labels by number", expected="{number: text}", got=named)
        by_number = {str(key): text for key, text in named.items()}
        if by_number.keys() != {str(i) for i in range(len(named))}:
            raise c.error("id2label", "numbers are missing", expected=f"0…{len(named) - 1}", got=[*named][:10])
        labels = tuple(by_number[str(i)] for i in range(len(named)))
        if count not in (None, len(labels)):
            raise c.error("num_labels", "is not how many there are", expected=len(labels), got=count)
    if c.raw("label2id", None) != {text: i for i, text in enumerate(labels)}:
        c.keep("label2id")  # whatever it says, scores are numbered by the other
    usual = _usual_kind(labels)
    kind = c.choice("problem_type", {"": usual, **{text: kind for kind, text in PROBLEMS.items()}}, "")
    if kind == usual:
        c.keep("problem_type")  # stated, null or left out: all the same
    return labels, kind


def write_labels(head: object) -> dict[str, Any]:
    """The inverse of :func:`read_labels`; nothing for another head."""
    if not isinstance(head, ClassifierSpec):
        return {}
    return {
        "id2label": {str(i): text for i, text in enumerate(head.labels)},
        "label2id": {text: i for i, text in enumerate(head.labels)},
        **({} if head.kind == _usual_kind(head.labels) else {"problem_type": PROBLEMS[head.kind]}),
    }


def _usual_kind(labels: Collection[str]) -> LabelKind:
    """What a config means that does not say: a lone label's score is a number."""
    return "regression" if len(labels) == 1 else "single"


def kind_of(spec: ModelSpec) -> Kind:
    """What a model is for, from its head."""
    match spec.head:
        case HeadSpec():
            return "ForMaskedLM"
        case ClassifierSpec() as head:
            return "ForTokenClassification" if head.pooler is None else "ForSequenceClassification"
        case _:
            return "Model"


def first_encoder(spec: ModelSpec) -> tuple[AttentionSpec, MlpSpec]:
    """Attention and feed-forward of the encoder's first layer, which the others repeat."""
    first = spec.encoder.layers[0]
    return first.attention, next(b.body for b in first.branches if isinstance(b.body, MlpSpec))


def stack_rules(spec: ModelSpec, stack: str, at: str, names: dict[str, str]) -> list[WeightRule]:
    """Every layer of a stack under other names: our part → its name in the layer that ``at`` ({i}) names."""
    rules: list[WeightRule] = []
    for i, layer in enumerate(spec.stacks[stack].layers):
        here = {f"{branch.name}.body" for branch in layer.branches}
        here |= {f"{b.name}.{norm}" for b in layer.branches for norm in NORMS if getattr(b, norm) is not None}
        held = {ours: theirs for ours, theirs in names.items() if ".".join(ours.split(".")[:2]) in here}
        rules += layer_rules(layer, i, at.format(i=i), held, stack=stack)
    return rules


def transform_rules(ours: str, spec: TransformSpec | None, dense: str, norm: str = "") -> list[WeightRule]:
    """A head's transform under other names."""
    if spec is None:
        return []
    rules: list[WeightRule] = [rename(f"{ours}.dense.weight", f"{dense}.weight")]
    if spec.bias:
        rules.append(rename(f"{ours}.dense.bias", f"{dense}.bias"))
    if spec.norm is not None:
        rules += norm_rules(f"{ours}.norm", spec.norm, norm)
    return rules


def norm_rules(ours: str, spec: NormSpec | None, theirs: str) -> list[WeightRule]:
    """A norm under another name, with its shift where it has one."""
    if spec is None:
        return []
    return [rename(f"{ours}.{part}", f"{theirs}.{part}") for part in (("weight", "bias") if spec.bias else ("weight",))]


def lm_rules(head: HeadSpec, weight: str, bias: str, other: str = "") -> list[WeightRule]:
    """The matrix and the shift that score tokens.

    Args:
        head: tied or not.
        weight, bias: their names.
        other: a second shift that the reference has. Tied, they are one; untied, it uses this one alone.
    """
    rules: list[WeightRule] = [
        Tie((weight,), same_as="embed.tokens") if head.tied else rename("head.weight", weight),
    ]
    if head.bias and other and not head.tied:
        rules += [rename("head.bias", other), Drop((bias,))]
    elif head.bias:
        rules += [rename("head.bias", bias), *([Tie((other,), same_as="head.bias")] if other else [])]
    return rules


def classifier_rules(head: ClassifierSpec, out: str) -> list[WeightRule]:
    """A classifier's last matrix."""
    return [rename(f"head.out.{part}", f"{out}.{part}") for part in (("weight", "bias") if head.bias else ("weight",))]


def without_pooler(spec: ModelSpec, stored: Stored) -> ModelSpec:
    """A bare model whose file has no pooler was saved without one, which its config does not say."""
    if isinstance(spec.head, PoolerSpec) and not any("pooler." in name for name in stored.names()):
        return replace(spec, head=None)
    return spec


def unused(*names: str) -> list[WeightRule]:
    """Tensors of a head that only training used, left behind by name."""
    return [Drop((name,), learned=True) for name in names]


__all__ = [
    "BOTH_WAYS",
    "KINDS",
    "Kind",
    "LabelKind",
    "classifier_rules",
    "first_encoder",
    "kind_of",
    "lm_rules",
    "norm_rules",
    "post_norm_block",
    "read_encoder_sizes",
    "read_kind",
    "read_labels",
    "stack_rules",
    "transform_rules",
    "unused",
    "without_pooler",
    "write_labels",
]
