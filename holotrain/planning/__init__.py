"""Predicts the memory of a training step before anything is allocated, and chooses what each block stores so that it fits.

fake_tensors     models and tensors that have shapes, but no memory
devices          how a device's allocator counts storages, and what operations do on CUDA
memory_tracker   memory at named places of any script, a warning of a leak, and what reads the memory in use
tracker          all bytes that operations allocate and free, and the memory of a step
training_step    one training step, and its simulation
planner          the memory of a step with other schedules, batch sizes and depths; free memory
choice           memory and time of a block under each schedule; what backward=auto chooses for each within a budget
memory_plan      memory under each schedule, largest batch and depth; asks `choice` for what a training leaves open
"""

from holotrain.planning.devices import Allocator
from holotrain.planning.memory_tracker import MemoryTracker
from holotrain.planning.planner import Planner, Size
from holotrain.planning.tracker import Footprint
from holotrain.planning.training_step import TrainingStep, Update, simulate_step

__all__ = ["Allocator", "Footprint", "MemoryTracker", "Planner", "Size", "TrainingStep", "Update", "simulate_step"]
