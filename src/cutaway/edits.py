"""What can be done to a quantity on its way: ``from cutaway import edits``, then ``edits.zero(heads=[3])``.

They go into ``edits=`` of ``model.trace``, by the name of the quantity: see :mod:`cutaway.inspection.edits`.
"""

from cutaway.inspection.edits import add, freeze, mean, replace, scale, steer, zero

__all__ = ["add", "freeze", "mean", "replace", "scale", "steer", "zero"]
