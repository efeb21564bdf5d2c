"""Runs with several processes: rank and size, starting processes, detecting that one died.

place     Place: rank and size of this process, from torchrun, SLURM or our own launcher
launch    starts the other processes on this machine
world     World: the processes of a run, messages between them, their process group
watch     Watch: detects which process died or hangs
progress  compares the numbers of launched collectives, to find the process that others wait for
share     which shard of the data a process reads

Nothing is imported here, because the command line needs its place before it imports torch.
"""
