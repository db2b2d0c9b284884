"""Seeing through: reading and editing what is computed."""

from cutaway.inspection.record import Edit, Recorder
from cutaway.inspection.trace import Trace, trace

__all__ = ["Edit", "Recorder", "Trace", "trace"]
