"""Linear layers for tensor parallelism that overlap communication with computation, in groups of rows.

linear       row- and column-parallel linear layers as functions of local tensors: the public functions
styles       the same as styles for parallelize_module
modules      the modules that a styled nn.Linear becomes
row, column  their autograd Functions
sending      sums over ranks, sent in groups of rows
signals      one product that signals its finished groups; kernel: its Triton kernel
products     the matrix products of a linear layer
shares       a sequence dimension sharded over ranks
groups       rows split into groups
collectives  the asynchronous collectives of a process group
tuner        chooses groups by measuring
predictor    predicts the time of a job in groups and chooses the best groups
pipeline     the recurrence, and the candidate groupings
waves        waves of output tiles on a GPU
links        the time of a collective
measuring    measured times of products, collectives and jobs
store        choices saved to files
emulated     an emulated link
"""

from holotrain.overlap.emulated import EmulatedCollectives
from holotrain.overlap.groups import Job
from holotrain.overlap.linear import column_parallel_linear, row_parallel_linear
from holotrain.overlap.links import LINKS, Link, MeasuredLink, link_named
from holotrain.overlap.predictor import Predictor
from holotrain.overlap.styles import OverlappedColwise, OverlappedRowwise
from holotrain.overlap.tuner import Tuner

__all__ = [
    "LINKS",
    "EmulatedCollectives",
    "Job",
    "Link",
    "MeasuredLink",
    "OverlappedColwise",
    "OverlappedRowwise",
    "Predictor",
    "Tuner",
    "column_parallel_linear",
    "link_named",
    "row_parallel_linear",
]
