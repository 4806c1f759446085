"""Layers that add their weight gradient to ``main_grad`` themselves, inside the matrix product: no gradient in between."""

from megabucket.fused.linear import Linear, linear

__all__ = ["Linear", "linear"]
