"""Tensors and checkpoints that are sharded over processes.

tensors   gathers and shards tensors
shards    reads sharded checkpoints, and defines their format
"""
