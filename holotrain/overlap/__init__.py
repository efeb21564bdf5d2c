"""Communication behind computation: linear layers of tensor parallelism whose collectives travel in groups of rows.

linear       row- and column-parallel linear layers as functions of local tensors: the public entrance
styles       the same for parallelize_module
modules      what a styled nn.Linear becomes
row, column  their autograd Functions
products     the products of a linear layer
shares       a sequence dimension shared out among ranks
groups       rows cut into groups
collectives  the collectives of a process group, launched and not waited for
"""

from holotrain.overlap.linear import column_parallel_linear, row_parallel_linear
from holotrain.overlap.styles import OverlappedColwise, OverlappedRowwise

__all__ = ["OverlappedColwise", "OverlappedRowwise", "column_parallel_linear", "row_parallel_linear"]
