"""Linear layers that overlap communication between processes with computation, in groups of rows or columns.

linear     linear layers as functions of local tensors: the public functions
styles     the same as styles for parallelize_module
functions  autograd Functions of layers that send their result or their input, and the ways to communicate
signals    products whose results are communicated in groups, or one that signals its finished groups
kernel     the Triton kernel of that one
groups     rows or columns split into groups; the asynchronous collectives of a process group
tuner      chooses groups by measuring, and saves the choices
predictor  predicts the time of a job in groups and chooses the best groups; the time of a collective on a link
"""

from holotrain.overlap.linear import all_to_all_linear, column_parallel_linear, linear_all_to_all, row_parallel_linear

__all__ = ["all_to_all_linear", "column_parallel_linear", "linear_all_to_all", "row_parallel_linear"]
