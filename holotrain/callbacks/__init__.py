"""Callbacks for any Lightning Trainer.

monitor             Monitor: how often callbacks measure; how they log scalars, figures and texts
memory              MemoryMonitor: memory of each phase
throughput          ThroughputMonitor: samples, tokens, MFU and HFU; FLOPs of a step, peak FLOP/s of known GPUs
optimization        OptimizationMonitor: the norm of the gradient, and the size of an update
model_monitors      DriftMonitor, ErrorDiffusionMonitor: what only some models have
synthesis_callback  SynthesisCallback: holographic weight synthesis before each optimizer step
shown               ConfusionMatrix, Predictions and Samples: what people look at in TensorBoard
trace               TraceProfiler: a few batches as a trace for Perfetto
interrupt           SaveOnSignal: saves a checkpoint before a signal ends the training, in all processes at the same batch
epoch_log           EpochLog: one line per epoch; progress: bar or lines

Those that save and resume are in :mod:`holotrain.checkpoints`.
"""

from holotrain.callbacks.epoch_log import progress
from holotrain.callbacks.memory import MemoryMonitor
from holotrain.callbacks.model_monitors import DriftMonitor, ErrorDiffusionMonitor
from holotrain.callbacks.optimization import OptimizationMonitor
from holotrain.callbacks.shown import ConfusionMatrix, Predictions, Samples
from holotrain.callbacks.synthesis_callback import SynthesisCallback
from holotrain.callbacks.throughput import ThroughputMonitor
from holotrain.checkpoints.saving import BestCheckpoint, WeightAverage

__all__ = [
    "BestCheckpoint",
    "ConfusionMatrix",
    "DriftMonitor",
    "ErrorDiffusionMonitor",
    "MemoryMonitor",
    "OptimizationMonitor",
    "Predictions",
    "Samples",
    "SynthesisCallback",
    "ThroughputMonitor",
    "WeightAverage",
    "progress",
]
