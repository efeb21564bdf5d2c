"""Several processes: how they start and find each other, and Lightning's strategies for them.

rank          ProcessRank: rank and size of this process
launch        starts the processes of one machine, with torch.distributed.elastic
process_group Processes: messages between the processes of a job, and their process group
data          DDP
sharded       FSDP2 and tensor parallel
checkpoints   sharded checkpoints: written by each process, read by all strategies
tensor        which layers are tensor parallel, and their styles

Nothing is imported here, because the command line needs its rank before it imports torch.
"""
