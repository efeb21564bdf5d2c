"""One file per command, each with ``run(config, run) -> exit status``, and what they share.

fit, validate, test, predict, generate, export, plan, report, init   the commands
run          one run: its folder, overrides and processes
evaluation   evaluating a checkpoint
checkpoint   loading and saving checkpoints
prompts      reading and encoding prompts
summary      summary.json
screen       start and end screens
automatic    backward=auto and batch_size=auto
plan_picture a plan as an SVG picture
advice       overrides that need less memory
out_of_memory  out-of-memory errors and their message
hparams      options and results, for TensorBoard's HParams
layout       the charts of TensorBoard's Custom Scalars
sweep        the table of a sweep
quiet        silences warnings of Lightning that do not matter
files        writing files atomically
"""
