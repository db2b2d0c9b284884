"""Native products, attention and blocks for a CPU, beside the plain PyTorch ones that define them."""

from cutaway.kernels.library import NativeLibrary, library, missing
from cutaway.kernels.stored import Stored, multiply, stored_matrix

__all__ = ["NativeLibrary", "Stored", "library", "missing", "multiply", "stored_matrix"]
