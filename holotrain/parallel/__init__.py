"""Lightning strategies for several processes, with additions.

environment   Joined: a cluster environment for processes that already run
data          DDP, with optional compression of gradients
powersgd      PowerSGD with a state for checkpoints
sharded       FSDP2 and tensor parallel
checkpoints   sharded checkpoints: written by each process, read by all strategies
tensor        which layers are tensor parallel, and their styles
"""
