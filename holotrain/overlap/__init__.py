"""Linear layers that overlap communication between processes with computation, in groups of rows or columns.

linear       linear layers as functions of local tensors: the public functions
styles       the same as styles for parallelize_module
modules      the modules that a styled nn.Linear becomes
row, column  autograd Functions of row- and column-parallel layers
exchange     autograd Functions of a layer after or before an all-to-all
sending      products whose results are sent in groups
signals      one product that signals its finished groups; kernel: its Triton kernel
products     the matrix products of a linear layer
shares       a sequence dimension sharded over ranks
groups       rows or columns split into groups
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
from holotrain.overlap.groups import Columns, Job
from holotrain.overlap.linear import all_to_all_linear, column_parallel_linear, linear_all_to_all, row_parallel_linear
from holotrain.overlap.links import LINKS, Link, MeasuredLink, link_named
from holotrain.overlap.predictor import Predictor
from holotrain.overlap.styles import OverlappedColwise, OverlappedRowwise
from holotrain.overlap.tuner import Tuner

__all__ = [
    "LINKS",
    "Columns",
    "EmulatedCollectives",
    "Job",
    "Link",
    "MeasuredLink",
    "OverlappedColwise",
    "OverlappedRowwise",
    "Predictor",
    "Tuner",
    "all_to_all_linear",
    "column_parallel_linear",
    "linear_all_to_all",
    "link_named",
    "row_parallel_linear",
]
