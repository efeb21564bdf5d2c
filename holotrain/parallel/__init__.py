"""Several processes: how they start and find each other, and Lightning's strategies for them.

rank           ProcessRank: rank and size of this process
processes      starts the processes of one machine, sends jobs to those of a launcher, and makes their process group
strategies     DDP, and FSDP2 with tensor parallel; clipping of gradients over a mesh
stages         pipelines: each process has some of the blocks

Nothing is imported here, because the command line needs its rank before it imports torch.
"""
