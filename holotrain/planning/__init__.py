"""What a training step will take, before anything is allocated; and what each block should store so that it fits.

imagination   models and tensors that exist in shape alone
ledger        every byte that operations allocate and free
allocators    what an allocator takes for them
rehearsal     one training step, in the order of a training
footprint     its memory in figures
"""

from holotrain.planning.allocators import ALLOCATORS
from holotrain.planning.footprint import Footprint
from holotrain.planning.imagination import Unplannable, imagine, imagined, selecting
from holotrain.planning.rehearsal import TrainingStep, rehearse

__all__ = ["ALLOCATORS", "Footprint", "TrainingStep", "Unplannable", "imagine", "imagined", "rehearse", "selecting"]
