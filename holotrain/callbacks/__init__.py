"""What accompanies a training, in any Lightning Trainer.

memory        MemoryMonitor: peak memory phase by phase
probe         where its figures come from
drift         DriftMonitor: how far rebuilt activations are from the true ones
diffusion     ErrorDiffusionMonitor: signs, dead cells, alignment with the true gradient
synthesis     SynthesisCallback: gradients rewritten before each optimizer step
throughput    ThroughputMonitor: samples, tokens, MFU and HFU
trace         TraceProfiler: a few batches as a trace for Perfetto
memory_picture  memory over the time of a batch, as SVG
padding       PaddingMonitor: how much of text batches is padding
period        how often callbacks measure
share         which share of the data a process reads
flops         FLOPs of a training step, peaks of known devices
interrupt     SaveOnSignal: a checkpoint before a signal ends the training
agreement     Agreement: processes learn of a signal at the same batch
exact_checkpoint  ExactCheckpoint: checkpoints from which training continues exactly
exact_resume ExactResume: what Lightning leaves out of a checkpoint
whole_steps   what happens between batches waits for the optimizer step
epoch_log     EpochLog: a line an epoch
"""

from holotrain.callbacks.diffusion import ErrorDiffusionMonitor
from holotrain.callbacks.drift import DriftMonitor
from holotrain.callbacks.epoch_log import EpochLog
from holotrain.callbacks.exact_checkpoint import ExactCheckpoint, last_checkpoint
from holotrain.callbacks.exact_resume import ExactResume
from holotrain.callbacks.flops import GPUS, multiprocessors, peak_flops, training_flops
from holotrain.callbacks.interrupt import Interrupted, SaveOnSignal
from holotrain.callbacks.memory import MemoryMonitor
from holotrain.callbacks.padding import PaddingMonitor
from holotrain.callbacks.synthesis import SynthesisCallback
from holotrain.callbacks.throughput import ThroughputMonitor
from holotrain.callbacks.trace import TraceProfiler

__all__ = [
    "GPUS",
    "DriftMonitor",
    "EpochLog",
    "ErrorDiffusionMonitor",
    "ExactCheckpoint",
    "ExactResume",
    "Interrupted",
    "MemoryMonitor",
    "PaddingMonitor",
    "SaveOnSignal",
    "SynthesisCallback",
    "ThroughputMonitor",
    "TraceProfiler",
    "last_checkpoint",
    "multiprocessors",
    "peak_flops",
    "training_flops",
]
