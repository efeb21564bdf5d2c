"""The commands, each with ``run(config, run) -> exit status``, and what they share.

fit, generate, export, plan   one file per command
evaluation    validate, test and predict
prepare       what a command begins with: its checkpoint, its data, its task
memory        backward=auto and batch_size=auto, and what would fit where a training does not
planner       the planner of a configuration
run           one run: its folder, its overrides, its summary.json, and whether it goes on
multiprocess  runs a command in one process or in several, which it checks
screen        what is printed and logged
sweep         what a sweep optimises, and its table
"""
