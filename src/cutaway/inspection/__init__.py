"""Seeing through: reading, editing and explaining what is computed."""

from cutaway.inspection.attribution import Attribution
from cutaway.inspection.attribution_patching import PatchEstimates, attribution_patching
from cutaway.inspection.centring import centre_writes
from cutaway.inspection.decompose import decompose
from cutaway.inspection.decomposition import Decomposition, Share
from cutaway.inspection.folding import fold_norms
from cutaway.inspection.gradients import integrated_gradients, saliency
from cutaway.inspection.occlusion import occlusion
from cutaway.inspection.record import Edit, Recorder
from cutaway.inspection.rewrite import Rewritten, centre_unembedding
from cutaway.inspection.target import Target, logprob
from cutaway.inspection.trace import Trace, trace

__all__ = [
    "Attribution",
    "Decomposition",
    "Edit",
    "PatchEstimates",
    "Recorder",
    "Rewritten",
    "Share",
    "Target",
    "Trace",
    "attribution_patching",
    "centre_unembedding",
    "centre_writes",
    "decompose",
    "fold_norms",
    "integrated_gradients",
    "logprob",
    "occlusion",
    "saliency",
    "trace",
]
