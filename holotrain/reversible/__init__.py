"""The engine: reversible blocks and their backward schedules. It needs only torch.

block               reversible blocks of two streams, and what a coupling is
sequence            a sequence of them: the main class
replaced_forward    a module's forward, replaced in place, and the stream in its calls
in_place            has the blocks of another model run again in the backward, and takes that back
lists_of_blocks     the lists of blocks in a model
tiles               the MLPs of another model, some tokens at a time
tiled_loss          the logits of another model, which wait for its loss
tiled_cross_entropy the loss of such logits, some tokens at a time
backward_schedules  what each block stores and what it recomputes, and results that a recomputation reuses
tokenwise           which modules work token by token, so that they can be taken in tiles
block_inputs        the ways to keep a block's input until the backward
recomputation       a branch that runs again in the backward
tape                records the branches of one forward, and rebuilds their inputs in the backward
side_stream         a second CUDA stream
checks              whether what is rebuilt is right, and what follows if not
settings            random number generators, autocast, attention kernels and the like, put back for the recomputation
context             whether a recomputation, a plan, a capture or a backward is running
reads               parameters, buffers and arguments, which must be the same in the recomputation
grid                the fixed-point grid of the streams, which follows them
graphs              a training step as one CUDA graph, and its random number generators
"""

from holotrain.reversible.coupling import ReversibleBlock
from holotrain.reversible.in_place import recompute, undo
from holotrain.reversible.schedule import checkpointed
from holotrain.reversible.sequence import ReversibleSequence

__all__ = ["ReversibleBlock", "ReversibleSequence", "checkpointed", "recompute", "undo"]
