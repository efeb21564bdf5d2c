"""Communication behind computation: linear layers of tensor parallelism whose collectives travel in groups of rows.

linear       row- and column-parallel linear layers as functions of local tensors: the public entrance
styles       the same for parallelize_module
modules      what a styled nn.Linear becomes
row, column  their autograd Functions
sending      sums over ranks sent in groups of rows
signals      one product whose groups are sent while it goes on; kernel: its Triton kernel
products     the products of a linear layer
shares       a sequence dimension shared out among ranks
groups       rows cut into groups
collectives  the collectives of a process group, launched and not waited for
tuner        chooses groups by measuring
predictor    predicts the time of a job in groups, and chooses the best
pipeline     the recurrence, and the ways to cut rows
waves        what a GPU computes at once
links        how long a collective takes
measuring    times of products, collectives and jobs
store        choices kept in files
emulated     a link that is not there
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
