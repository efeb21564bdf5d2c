"""One file a command, each with ``run(config, run) -> exit status``; the rest is what they share.

fit, validate, test, predict, generate, export, plan, report   the commands
run          one run: its folder and where it came from
evaluation   measuring a checkpoint
checkpoint   checkpoints on their way in and out
prompts      texts to continue
summary      summary.json
screen       what a person sees
automatic    what a training chooses by itself before it begins
plan_picture a plan as SVG
advice       what would make a training need less memory
out_of_memory  an allocator's refusal in a user's words
hparams      options and results, for TensorBoard's HParams
layout       charts, for TensorBoard's Custom Scalars
sweep        the table that a sweep leaves
quiet        what Lightning need not say
files        files that are there whole or not at all
"""
