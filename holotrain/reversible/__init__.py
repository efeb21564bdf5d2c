"""The engine: reversible blocks and the schedules of their backward. Needs torch alone.

block      the coupling and its inverse
sequence   a run of blocks: the public entrance
schedules  the backward schedules by name
recompute  the reversible schedule: one autograd Function a block on a shared tape
half       half a coupling forwards and backwards, the unit of recomputation
ambient    random state and autocast, replayed in the recomputation
"""

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.sequence import ReversibleSequence

__all__ = ["ReversibleBlock", "ReversibleSequence"]
