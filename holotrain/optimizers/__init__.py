"""Optimizers around optimizers. They need only torch; low_bit also needs torchao.

in_backward   each parameter is stepped as soon as its gradient is complete
combined      several optimizers, over different parameters, that step as one
low_bit       torchao's optimizers, whose state has 8 or 4 bits an entry
standing_in   a step on other tensors than the parameters
plain_state   states of a library's own classes of tensors, as plain tensors in a checkpoint
"""

from holotrain.optimizers.combined import CombinedOptimizer
from holotrain.optimizers.in_backward import InBackward
from holotrain.optimizers.low_bit import low_bit
from holotrain.optimizers.plain_state import UnfitState

__all__ = ["CombinedOptimizer", "InBackward", "UnfitState", "low_bit"]
