"""Callbacks for any Lightning Trainer.

monitors            Monitor: how often callbacks measure and log; OptimizationMonitor, DriftMonitor, ErrorDiffusionMonitor
memory              MemoryMonitor: memory of each phase
throughput          ThroughputMonitor: samples, tokens, MFU and HFU; FLOPs of a step, peak FLOP/s of known GPUs
synthesis_callback  SynthesisCallback: holographic weight synthesis before each optimizer step
shown               ConfusionMatrix, Predictions, Samples: what people look at in TensorBoard; progress: bar or lines
trace               TraceProfiler: a few batches as a trace for Perfetto
measured            Measured: what a training has measured, for its checkpoints and its summary
tensorboard_tabs    options, results and charts in TensorBoard's HParams and Custom Scalars
interrupt           SaveOnSignal: saves a checkpoint before a signal ends the training, in all processes at the same batch

Those that save and resume are in :mod:`holotrain.checkpoints`.
"""

from holotrain.callbacks.memory import MemoryMonitor
from holotrain.callbacks.monitors import DriftMonitor, ErrorDiffusionMonitor, OptimizationMonitor
from holotrain.callbacks.shown import ConfusionMatrix, Predictions, Samples, progress
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
