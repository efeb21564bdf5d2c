"""Predicts the memory of a training step before anything is allocated, and chooses what each block stores so that it fits.

imagination   fake models and tensors: shapes without memory
ledger        all bytes that operations allocate and free
allocators    how a device's allocator counts them
scratch       upper bound of what an operation may hold inside itself on a CPU
rehearsal     one training step, in the order of a training
footprint     the memory of a step
measured      the memory of a real step, for comparison
planner       the memory of a step with other schedules, batch sizes and depths
search        the largest size that fits
limits        the largest batch and the largest depth that fit
costs         memory and time of a block under each schedule
choice        the schedules of all blocks within a budget
auto          chooses the schedules or the batch size of a training
budget        the free memory of a device
plan          memory under each schedule, largest batch and depth
work          the arithmetic of a step, of the parts of a model and of a tensor parallel rank
step_times    the time of a step on one device
rank_memory   the memory of one rank of several devices
scaling       the time of a step on several devices
strategies    memory and time of a training under each strategy
"""

from holotrain.planning.allocators import ALLOCATORS
from holotrain.planning.auto import choose_batch, choose_schedules
from holotrain.planning.budget import free_memory
from holotrain.planning.choice import Choice, Option, Stage, TooSmall, choose
from holotrain.planning.costs import flops, seconds, stage_of, visits_of
from holotrain.planning.footprint import Footprint
from holotrain.planning.imagination import Unplannable, fused_dropout, imagine, imagined, selecting
from holotrain.planning.limits import largest_batch, largest_depth
from holotrain.planning.measured import measured_peak
from holotrain.planning.plan import Plan, make_plan
from holotrain.planning.planner import Backward, Planner, Size
from holotrain.planning.rehearsal import TrainingStep, rehearse
from holotrain.planning.scaling import Band
from holotrain.planning.search import largest
from holotrain.planning.step_times import Gpu
from holotrain.planning.strategies import Scaling, make_scaling

__all__ = [
    "ALLOCATORS",
    "Backward",
    "Band",
    "Choice",
    "Footprint",
    "Gpu",
    "Option",
    "Plan",
    "Planner",
    "Scaling",
    "Size",
    "Stage",
    "TooSmall",
    "TrainingStep",
    "Unplannable",
    "choose",
    "choose_batch",
    "choose_schedules",
    "flops",
    "free_memory",
    "fused_dropout",
    "imagine",
    "imagined",
    "largest",
    "largest_batch",
    "largest_depth",
    "make_plan",
    "make_scaling",
    "measured_peak",
    "rehearse",
    "seconds",
    "selecting",
    "stage_of",
    "visits_of",
]
