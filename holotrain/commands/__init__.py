"""The commands, each with ``run(config, run) -> exit status``, and what they share.

fit, predict, generate, export, plan, init   one file per command
evaluation        validate and test; the data of a run, which all of its processes have to find alike
run_folder        one run: its folder, overrides and processes
multiprocess      runs a command in one process or in several, which it checks, in the precision that it names
checkpoint        loading and saving checkpoints
summary           summary.json; what a training has measured, in its checkpoints too; whether a run goes on
screen            the first and the last screen
console           what is printed and logged, and which warnings are not
memory_limits     backward=auto and batch_size=auto, running out of memory, overrides with which a training fits
planners          what planning needs to know of a configuration
sweep             the table of a sweep, and what a job returns to a sweeper
tensorboard_tabs  options, results and charts in TensorBoard's HParams and Custom Scalars
"""
