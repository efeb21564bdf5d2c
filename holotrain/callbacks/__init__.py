"""Callbacks for any Lightning Trainer.

memory        MemoryMonitor: memory of each phase, and leaks
growth        tells a leak from the ups and downs of memory
probe         reads memory use of the device or process
drift         DriftMonitor: error of recomputed activations
diffusion     ErrorDiffusionMonitor: signs, dead cells, alignment with the true gradient
synthesis     SynthesisCallback: holographic weight synthesis before each optimizer step
throughput    ThroughputMonitor: samples, tokens, MFU and HFU
trace         TraceProfiler: a few batches as a trace for Perfetto
memory_picture  memory during a batch, as SVG
optimization  OptimizationMonitor: gradient norm, relative size of updates
histograms    Histograms: distributions of weights and gradients
predictions   Predictions: validation images with predictions
confusion     ConfusionMatrix: which classes are taken for which
classified    reads a classifier's outputs during validation
samples       Samples: texts of a causal language model
drawing       pictures with text, drawn with Pillow
media         images and text for each kind of logger
padding       PaddingMonitor: fraction of padding in text batches
period        how often callbacks measure, and whether they can
share         which shard of the data a process reads
flops         FLOPs of a training step, peak FLOP/s of known GPUs
interrupt     SaveOnSignal: saves a checkpoint before a signal ends the training
agreement     Agreement: processes receive a signal at the same batch
exact_checkpoint  ExactCheckpoint, BestCheckpoint: checkpoints for exact resumption
average       WeightAverage: moving average of the weights
exact_resume  ExactResume: state that Lightning leaves out of checkpoints
whole_steps   delays what happens between batches to the optimizer step
epoch_log     EpochLog: one line per epoch; progress: bar or lines
"""

from holotrain.callbacks.average import WeightAverage
from holotrain.callbacks.confusion import ConfusionMatrix
from holotrain.callbacks.diffusion import ErrorDiffusionMonitor
from holotrain.callbacks.drift import DriftMonitor
from holotrain.callbacks.epoch_log import EpochLog, progress
from holotrain.callbacks.exact_checkpoint import BestCheckpoint, ExactCheckpoint, last_checkpoint
from holotrain.callbacks.exact_resume import ExactResume
from holotrain.callbacks.flops import GPUS, multiprocessors, peak_flops, training_flops
from holotrain.callbacks.histograms import Histograms
from holotrain.callbacks.interrupt import Interrupted, SaveOnSignal
from holotrain.callbacks.memory import MemoryMonitor
from holotrain.callbacks.optimization import OptimizationMonitor
from holotrain.callbacks.padding import PaddingMonitor
from holotrain.callbacks.predictions import Predictions
from holotrain.callbacks.samples import Samples
from holotrain.callbacks.synthesis import SynthesisCallback
from holotrain.callbacks.throughput import ThroughputMonitor
from holotrain.callbacks.trace import TraceProfiler

__all__ = [
    "GPUS",
    "BestCheckpoint",
    "ConfusionMatrix",
    "DriftMonitor",
    "EpochLog",
    "ErrorDiffusionMonitor",
    "ExactCheckpoint",
    "ExactResume",
    "Histograms",
    "Interrupted",
    "MemoryMonitor",
    "OptimizationMonitor",
    "PaddingMonitor",
    "Predictions",
    "Samples",
    "SaveOnSignal",
    "SynthesisCallback",
    "ThroughputMonitor",
    "TraceProfiler",
    "WeightAverage",
    "last_checkpoint",
    "multiprocessors",
    "peak_flops",
    "progress",
    "training_flops",
]
