"""Lightning's strategies for several processes, and what they lack.

environment   Joined: tells Lightning that the processes are there already
data          DDP, with compressed gradients by option
powersgd      PowerSGD, whose state checkpoints keep
sharded       FSDP2 and tensor parallel: parameters shared out
tensor        which layers are shared out, and in what style
"""
