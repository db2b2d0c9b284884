"""Seeing through: reading and editing what is computed."""

from cutaway.inspection.change import Change, Changed, Edit
from cutaway.inspection.edits import add, freeze, mean, replace, scale, steer, zero
from cutaway.inspection.record import Recorder
from cutaway.inspection.running import trace
from cutaway.inspection.trace import Trace
from cutaway.inspection.where import Place, Where, where

__all__ = [
    "Change",
    "Changed",
    "Edit",
    "Place",
    "Recorder",
    "Trace",
    "Where",
    "add",
    "freeze",
    "mean",
    "replace",
    "scale",
    "steer",
    "trace",
    "where",
    "zero",
]
