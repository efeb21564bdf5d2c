"""Overrides for a run of about a second, and a run that is killed."""

SMALL = [
    "model.dim=16",
    "model.depth=2",
    "model.heads=2",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
    "trainer.log_every_n_steps=1",
]

KILLED = """
import os, signal, sys
import lightning.pytorch as pl
from holotrain.callbacks import ExactResume
def kill(self, trainer, module, outputs, batch, index):
    if trainer.current_epoch == 1 and index == 4:
        os.kill(os.getpid(), signal.SIGKILL)
ExactResume.on_train_batch_end = kill
from holotrain.cli import main
main(["fit", *sys.argv[1:]])
"""
"""A program for ``python -c``: ``fit`` with the given overrides, killed in the middle of the second epoch."""
