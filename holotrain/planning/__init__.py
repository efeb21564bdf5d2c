"""Predicts the memory of a training step before anything is allocated, and chooses what each block stores so that it fits.

imagination   fake models and tensors: shapes without memory
ledger        all bytes that operations allocate and free
allocators    how a device's allocator counts them
scratch       upper bound of what an operation may hold inside itself on a CPU
rehearsal     one training step, in the order of a training
footprint     the memory of a step
measured      the memory of a real step, for comparison
search        the largest size that fits
costs         memory and time of a block under each schedule
choice        the schedules of all blocks within a budget
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
