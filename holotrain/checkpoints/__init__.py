"""Checkpoints: saved whole or not at all, and resumed bit for bit on any number of processes.

saving        ExactCheckpoint, BestCheckpoint: where training can continue exactly; WeightAverage: of the weights
exact_resume  ExactResume: random states and more that Lightning leaves out of checkpoints; stops after whole steps only
distributed   CheckpointFiles and ShardedCheckpoints: Lightning's checkpoint I/O, and the strategy that writes with DCP

:mod:`holotrain.models.checkpoint_files` reads checkpoints, because models start from them too.
"""
