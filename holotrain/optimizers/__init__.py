"""Optimizers around optimizers: one that steps within the backward, and several that step as one. They need only torch.

in_backward   each parameter is stepped as soon as its gradient is complete
combined      several optimizers, over different parameters, that step as one
"""

from holotrain.optimizers.combined import CombinedOptimizer
from holotrain.optimizers.in_backward import InBackward

__all__ = ["CombinedOptimizer", "InBackward"]
