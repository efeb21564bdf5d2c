"""Lightning's strategies for several processes, and what they lack.

environment   Joined: tells Lightning that the processes are there already
data          DDP, with compressed gradients by option
powersgd      PowerSGD, whose state checkpoints keep
sharded       FSDP2 and tensor parallel: parameters shared out
checkpoints   in shards: written by each process, read by all strategies
tensor        which layers are shared out, and in what style
"""
