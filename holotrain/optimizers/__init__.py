"""Optimizers around optimizers. They need only torch; low_bit also needs torchao.

stepping  InBackward: each parameter is stepped as soon as its gradient is complete; CombinedOptimizer: several as one
low_bit   torchao's optimizers, whose state has 8 or 4 bits an entry, with plain tensors in checkpoints
"""

from holotrain.optimizers.stepping import InBackward

__all__ = ["InBackward"]
