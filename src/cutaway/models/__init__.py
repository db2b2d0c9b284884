"""Whole models, put together from a spec."""

from cutaway.models.transformer import Transformer

__all__ = ["Transformer"]
