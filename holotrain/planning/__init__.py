"""What a training step will take, before anything is allocated; and what each block should store so that it fits.

imagination   models and tensors that exist in shape alone
ledger        every byte that operations allocate and free
allocators    what an allocator takes for them
scratch       what an operation may hold within itself on a CPU, at most
rehearsal     one training step, in the order of a training
footprint     its memory in figures
measured      the memory that a real step takes, to compare
search        the largest size that fits
costs         what each schedule costs a block
choice        the schedules of all blocks, within a budget
rank_memory   the memory of one rank of several devices
scaling       the time of a step on several devices
"""

from holotrain.planning.allocators import ALLOCATORS
from holotrain.planning.choice import MARGIN, Choice, Option, Stage, TooSmall, choose
from holotrain.planning.costs import flops, seconds, stage_of, visited
from holotrain.planning.footprint import Footprint
from holotrain.planning.imagination import Unplannable, fused_dropout, imagine, imagined, selecting
from holotrain.planning.measured import measured_peak
from holotrain.planning.rank_memory import Unit, ddp_bytes, fsdp_bytes
from holotrain.planning.rehearsal import TrainingStep, Update, rehearse, rehearse_update
from holotrain.planning.scaling import (
    Band,
    Divided,
    Prediction,
    Setting,
    Times,
    ddp_seconds,
    fsdp_seconds,
    predicted,
    settings_of,
    tp_seconds,
)
from holotrain.planning.search import largest

__all__ = [
    "ALLOCATORS",
    "MARGIN",
    "Band",
    "Choice",
    "Divided",
    "Footprint",
    "Option",
    "Prediction",
    "Setting",
    "Stage",
    "Times",
    "TooSmall",
    "TrainingStep",
    "Unit",
    "Unplannable",
    "Update",
    "choose",
    "ddp_bytes",
    "ddp_seconds",
    "flops",
    "fsdp_bytes",
    "fsdp_seconds",
    "fused_dropout",
    "imagine",
    "imagined",
    "largest",
    "measured_peak",
    "predicted",
    "rehearse",
    "rehearse_update",
    "seconds",
    "selecting",
    "settings_of",
    "stage_of",
    "tp_seconds",
    "visited",
]
