"""Several processes that do one run together: which of them this is, how they are started, how they notice a death.

place     Place: this process's number among how many, as torchrun, SLURM or our own start says
launch    starting the others of this machine
world     World: the processes of a run, what they agree on, the group in which they train
watch     Watch: notices when one of them dies or hangs, and says which
progress  how far a process has come, in collectives that it has launched, and whom the others wait for
tensors   tensors that are shared out, put together and taken apart
shards    checkpoints of such tensors, to which each process adds its own part: read, and what stands in them
share     which share of the data a process reads

Nothing is imported here: the command line asks for its place before it needs torch.
"""
