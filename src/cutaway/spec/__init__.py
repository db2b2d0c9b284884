"""A model as frozen data: what it is made of, with no torch and no weights.

Everything here is hashable and compares by value, so that "the same kind of layer" is ``==``.
"""

from cutaway.spec.attention import AttentionSpec, MaskRule
from cutaway.spec.block import BlockSpec, BranchSpec
from cutaway.spec.head import ClassifierSpec, HeadSpec, PoolerSpec, TransformSpec
from cutaway.spec.mlp import Activation, MlpSpec, MoeSpec
from cutaway.spec.model import EmbeddingSpec, ModelSpec, StackSpec
from cutaway.spec.norm import NormSpec
from cutaway.spec.position import (
    AlibiBias,
    BucketBias,
    DynamicScaling,
    FactorScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotarySpec,
    ShawRelative,
    SinusoidalPositions,
    YarnScaling,
)
from cutaway.spec.settings import GenerationSettings

__all__ = [
    "Activation",
    "AlibiBias",
    "AttentionSpec",
    "BlockSpec",
    "BranchSpec",
    "BucketBias",
    "ClassifierSpec",
    "DynamicScaling",
    "EmbeddingSpec",
    "FactorScaling",
    "GenerationSettings",
    "HeadSpec",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongScaling",
    "MaskRule",
    "MlpSpec",
    "ModelSpec",
    "MoeSpec",
    "NormSpec",
    "PoolerSpec",
    "RotarySpec",
    "ShawRelative",
    "SinusoidalPositions",
    "StackSpec",
    "TransformSpec",
    "YarnScaling",
]
