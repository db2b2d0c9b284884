"""Seeing through: reading, editing and explaining what is computed."""

from cutaway.inspection.attribution import Attribution
from cutaway.inspection.attribution_patching import PatchEstimates, attribution_patching
from cutaway.inspection.centring import centre_writes
from cutaway.inspection.change import Change, Changed, Edit
from cutaway.inspection.decompose import decompose
from cutaway.inspection.decomposition import Decomposition, Share
from cutaway.inspection.edits import add, freeze, mean, replace, scale, steer, zero
from cutaway.inspection.folding import fold_norms
from cutaway.inspection.gradients import integrated_gradients, saliency
from cutaway.inspection.occlusion import occlusion
from cutaway.inspection.record import Recorder
from cutaway.inspection.rewrite import Rewritten, centre_unembedding
from cutaway.inspection.running import trace
from cutaway.inspection.target import Target, logprob
from cutaway.inspection.trace import Trace
from cutaway.inspection.where import Place, Where, where

__all__ = [
    "Attribution",
    "Change",
    "Changed",
    "Decomposition",
    "Edit",
    "PatchEstimates",
    "Place",
    "Recorder",
    "Rewritten",
    "Share",
    "Target",
    "Trace",
    "Where",
    "add",
    "attribution_patching",
    "centre_unembedding",
    "centre_writes",
    "decompose",
    "fold_norms",
    "freeze",
    "integrated_gradients",
    "logprob",
    "mean",
    "occlusion",
    "replace",
    "saliency",
    "scale",
    "steer",
    "trace",
    "where",
    "zero",
]
