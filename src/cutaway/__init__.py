"""cutaway: one readable transformer you can run, train, serve and see through.

>>> import cutaway
>>> "load" in cutaway.__all__
True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cutaway.collecting import uncollected

if TYPE_CHECKING:
    from cutaway.errors import CutawayError
    from cutaway.generation.generate import Generation
    from cutaway.generation.session import Session
    from cutaway.inspection.trace import Trace
    from cutaway.model import Model
    from cutaway.models.batch import pad
    from cutaway.spec.model import ModelSpec
    from cutaway.store import build, load, save

__version__ = "0.1.0"

# Imported when first asked for, so that `import cutaway` brings in neither torch nor numpy.
_WHERE = {
    "CutawayError": "cutaway.errors",
    "Generation": "cutaway.generation.generate",
    "Model": "cutaway.model",
    "ModelSpec": "cutaway.spec.model",
    "Session": "cutaway.generation.session",
    "Trace": "cutaway.inspection.trace",
    "build": "cutaway.store",
    "load": "cutaway.store",
    "pad": "cutaway.models.batch",
    "save": "cutaway.store",
}
__all__ = [
    "CutawayError",
    "Generation",
    "Model",
    "ModelSpec",
    "Session",
    "Trace",
    "__version__",
    "build",
    "load",
    "pad",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in ("edits", "errors", "spec"):  # worth reading from a prompt
        return importlib.import_module(f"cutaway.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'cutaway' has no attribute {name!r}")
    with uncollected():
        value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
