"""Seeing through: reading, editing and explaining what is computed."""

from cutaway.inspection.ablation import Ablation, ablation_sweep, loss_without
from cutaway.inspection.attribution import Attribution
from cutaway.inspection.attribution_patching import PatchEstimates, attribution_patching
from cutaway.inspection.centring import centre_writes
from cutaway.inspection.change import Change, Changed, Edit
from cutaway.inspection.compare import Comparison, Difference, compare
from cutaway.inspection.copying import copying_scores
from cutaway.inspection.decompose import decompose
from cutaway.inspection.decomposition import Decomposition, Share
from cutaway.inspection.edits import add, freeze, mean, replace, scale, steer, zero
from cutaway.inspection.effect import Effect, effect
from cutaway.inspection.embeddings import Neighbours, Plane, analogy, neighbours, plane
from cutaway.inspection.folding import fold_norms
from cutaway.inspection.gradients import integrated_gradients, saliency
from cutaway.inspection.heads import Heads, head_scores, repeated
from cutaway.inspection.lens import Lens, lens
from cutaway.inspection.metrics import Metric, TokenMetric, log_probability, logit_difference
from cutaway.inspection.neurons import Neurons, neurons
from cutaway.inspection.occlusion import occlusion
from cutaway.inspection.patching import Sweep, patch_sweep
from cutaway.inspection.paths import Paths, Receiver, path_sweep
from cutaway.inspection.pattern import Pattern, pattern
from cutaway.inspection.record import Recorder
from cutaway.inspection.rewrite import Rewritten, centre_unembedding
from cutaway.inspection.running import trace
from cutaway.inspection.target import Target, logprob
from cutaway.inspection.trace import Trace
from cutaway.inspection.tuned_lens import TunedLens
from cutaway.inspection.tuning import train_lens
from cutaway.inspection.views import HeadView, head_looks_for, head_writes
from cutaway.inspection.where import Place, Where, where

__all__ = [
    "Ablation",
    "Attribution",
    "Change",
    "Changed",
    "Comparison",
    "Decomposition",
    "Difference",
    "Edit",
    "Effect",
    "HeadView",
    "Heads",
    "Lens",
    "Metric",
    "Neighbours",
    "Neurons",
    "PatchEstimates",
    "Paths",
    "Pattern",
    "Place",
    "Plane",
    "Receiver",
    "Recorder",
    "Rewritten",
    "Share",
    "Sweep",
    "Target",
    "TokenMetric",
    "Trace",
    "TunedLens",
    "Where",
    "ablation_sweep",
    "add",
    "analogy",
    "attribution_patching",
    "centre_unembedding",
    "centre_writes",
    "compare",
    "copying_scores",
    "decompose",
    "effect",
    "fold_norms",
    "freeze",
    "head_looks_for",
    "head_scores",
    "head_writes",
    "integrated_gradients",
    "lens",
    "log_probability",
    "logit_difference",
    "logprob",
    "loss_without",
    "mean",
    "neighbours",
    "neurons",
    "occlusion",
    "patch_sweep",
    "path_sweep",
    "pattern",
    "plane",
    "repeated",
    "replace",
    "saliency",
    "scale",
    "steer",
    "trace",
    "train_lens",
    "where",
    "zero",
]
