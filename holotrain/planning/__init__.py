"""Predicts the memory of a training step before anything is allocated, and chooses what each block stores so that it fits.

fake_tensors     models and tensors that have shapes, but no memory
allocators       how a device's allocator counts storages, and what operations hold inside themselves
cuda_rules       what operations do on CUDA, on fake tensors of a CPU
probes           memory in use and its peak, on this machine
memory_tracker   memory at named places of any script, and a warning of a leak
tracker          all bytes that operations allocate and free, and the memory of a step
training_step    one training step, simulated or measured
planner          the memory of a step with other schedules, batch sizes and depths; free memory
choice           memory and time of a block under each schedule; what backward=auto chooses for each within a budget
memory_plan      memory under each schedule, largest batch and depth; asks `choice` for what a training leaves open
"""

from holotrain.planning.memory_tracker import MemoryTracker
from holotrain.planning.planner import Planner
from holotrain.planning.training_step import simulate_step

__all__ = ["MemoryTracker", "Planner", "simulate_step"]
