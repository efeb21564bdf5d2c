"""The engine: reversible blocks and the schedules of their backward. Needs torch alone.

block      the coupling and its inverse
sequence   a run of blocks: the public entrance
convert    somebody else's stack of blocks, made reversible
schedules  the backward schedules by name
recompute  the recomputing schedules: one autograd Function a block on a shared tape
half       half a coupling forwards and backwards, the unit of recomputation
lanes      where a recomputation runs while gradients are computed: in turn, a second stream, a second thread
trial      whether overlap pays, measured
clock      CUDA events or the host's clock
grid       the fixed-point grid of an exact sequence
kept       results that a recomputation reuses
drift      how far a rebuilt input is from the true one
ranges     the schedule's names in a profiler's trace
graphs     a training step as one CUDA graph
graph_random  random numbers in a captured graph
ambient    random state, autocast and attention kernels, replayed in the recomputation
checkpointing  torch.utils.checkpoint, block by block
buffers    buffers that a branch writes, written once
keywords   keyword arguments through an autograd Function
refusals   what cannot be right, refused by name
"""

from holotrain.reversible.ambient import recomputing
from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.convert import convert
from holotrain.reversible.graphs import GraphedStep
from holotrain.reversible.sequence import ReversibleSequence

__all__ = ["GraphedStep", "ReversibleBlock", "ReversibleSequence", "convert", "recomputing"]
