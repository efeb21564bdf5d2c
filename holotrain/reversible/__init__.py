"""The engine: reversible blocks and their backward schedules. It needs only torch.

block      the coupling of two streams and its inverse
sequence   a sequence of blocks: the main class
convert    makes the blocks of another model reversible
schedules  the backward schedules by name
recompute  the recomputing schedules: one autograd Function per block
half       one branch of a block in one call, the unit of recomputation
lanes      where a recomputation runs: in turn, on a second stream or on a second thread
trial      measures whether overlap is faster
clock      CUDA events or the host's clock
grid       the fixed-point grid of an exact sequence
kept       results that a recomputation reuses
drift      the error of a rebuilt input
ranges     names in a profiler's trace
graphs     a training step as one CUDA graph
graph_random  random numbers in a captured graph
ambient    random state, autocast and attention kernels, restored for the recomputation
checkpointing  torch.utils.checkpoint for each block
buffers    buffers that a branch changes, such as running statistics
keywords   keyword arguments through an autograd Function
refusals   errors for modules and hooks that cannot be recomputed
"""

from holotrain.reversible.ambient import recomputing
from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.convert import convert
from holotrain.reversible.graphs import GraphedStep
from holotrain.reversible.sequence import ReversibleSequence

__all__ = ["GraphedStep", "ReversibleBlock", "ReversibleSequence", "convert", "recomputing"]
