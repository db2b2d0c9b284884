"""Seeing through: reading and editing what is computed."""

from cutaway.inspection.ablation import Ablation, ablation_sweep, loss_without
from cutaway.inspection.change import Change, Changed, Edit
from cutaway.inspection.compare import Comparison, Difference, compare
from cutaway.inspection.copying import copying_scores
from cutaway.inspection.edits import add, freeze, mean, replace, scale, steer, zero
from cutaway.inspection.embeddings import Neighbours, Plane, analogy, neighbours, plane
from cutaway.inspection.heads import Heads, head_scores, repeated
from cutaway.inspection.lens import Lens, lens
from cutaway.inspection.metrics import Metric, TokenMetric, log_probability, logit_difference
from cutaway.inspection.patching import Sweep, patch_sweep
from cutaway.inspection.paths import Paths, Receiver, path_sweep
from cutaway.inspection.record import Recorder
from cutaway.inspection.running import trace
from cutaway.inspection.trace import Trace
from cutaway.inspection.tuned_lens import TunedLens
from cutaway.inspection.tuning import train_lens
from cutaway.inspection.views import HeadView, head_looks_for, head_writes
from cutaway.inspection.where import Place, Where, where

__all__ = [
    "Ablation",
    "Change",
    "Changed",
    "Comparison",
    "Difference",
    "Edit",
    "HeadView",
    "Heads",
    "Lens",
    "Metric",
    "Neighbours",
    "Paths",
    "Place",
    "Plane",
    "Receiver",
    "Recorder",
    "Sweep",
    "TokenMetric",
    "Trace",
    "TunedLens",
    "Where",
    "ablation_sweep",
    "add",
    "analogy",
    "compare",
    "copying_scores",
    "freeze",
    "head_looks_for",
    "head_scores",
    "head_writes",
    "lens",
    "log_probability",
    "logit_difference",
    "loss_without",
    "mean",
    "neighbours",
    "patch_sweep",
    "path_sweep",
    "plane",
    "repeated",
    "replace",
    "scale",
    "steer",
    "trace",
    "train_lens",
    "where",
    "zero",
]
