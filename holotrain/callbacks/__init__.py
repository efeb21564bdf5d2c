"""What accompanies a training, in any Lightning Trainer.

memory        MemoryMonitor: peak memory phase by phase
probe         where its figures come from
throughput    ThroughputMonitor: samples, tokens, MFU and HFU
clock         CUDA events or the host's clock
flops         FLOPs of a training step, peaks of known devices
interrupt     SaveOnSignal: a checkpoint before a signal ends the training
exact_checkpoint  ExactCheckpoint: checkpoints from which training continues exactly
random_state  RandomState: a resumed training draws the same random numbers
epoch_log     EpochLog: a line an epoch
"""

from holotrain.callbacks.epoch_log import EpochLog
from holotrain.callbacks.exact_checkpoint import ExactCheckpoint, last_checkpoint
from holotrain.callbacks.flops import peak_flops, training_flops
from holotrain.callbacks.interrupt import Interrupted, SaveOnSignal
from holotrain.callbacks.memory import MemoryMonitor
from holotrain.callbacks.random_state import RandomState
from holotrain.callbacks.throughput import ThroughputMonitor

__all__ = [
    "EpochLog",
    "ExactCheckpoint",
    "Interrupted",
    "MemoryMonitor",
    "RandomState",
    "SaveOnSignal",
    "ThroughputMonitor",
    "last_checkpoint",
    "peak_flops",
    "training_flops",
]
