"""Builds the native kernels into the wheel; without a C++ compiler the package is pure Python, and says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILING = "src/cutaway/kernels/compiling.py"


class NativeKernels(BuildHookInterface):  # type: ignore[misc]
    """Compiles before a wheel, editable or not, is made."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and mark the wheel as this platform's."""
        if self.target_name != "wheel":
            return
        # By its path: importing the package would import torch, which a build does not have.
        spec = importlib.util.spec_from_file_location("compiling", Path(self.root) / COMPILING)
        assert spec is not None
        assert spec.loader is not None
        compiling = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiling)
        why = compiling.compile_libraries()
        if why:
            compiling.remove_libraries()
            self.app.display_warning(f"cutaway is built without native kernels: {why}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
