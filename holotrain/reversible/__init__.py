"""The engine: reversible blocks and their backward schedules. It needs only torch.

block          the coupling of two streams and its inverse
sequence       a sequence of blocks: the main class
schedules      what each block stores and what it recomputes
recomputation  branches that run again in the backward, from a stored or from a rebuilt input
replay         random numbers, autocast and attention kernels, put back for the recomputation
reads          parameters, buffers and arguments, which must be the same in the recomputation
kept           results that a recomputation reuses
grid           the fixed-point grid of an exact sequence
drift          the error of a rebuilt input
graphs         a training step as one CUDA graph
convert        makes the blocks of another model reversible
"""

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.convert import convert
from holotrain.reversible.graphs import GraphedStep
from holotrain.reversible.recomputation import checkpointed
from holotrain.reversible.replay import recomputing
from holotrain.reversible.sequence import ReversibleSequence

__all__ = ["GraphedStep", "ReversibleBlock", "ReversibleSequence", "checkpointed", "convert", "recomputing"]
