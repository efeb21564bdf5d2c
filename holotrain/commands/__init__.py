"""The commands, each with ``run(config, run) -> exit status``, and what they share.

fit, predict, generate, export, plan, init   one file per command
evaluation    validate and test
prepare       what a command begins with: its checkpoint, its data, its task
memory        backward=auto and batch_size=auto, and what would fit where a training does not
planner       the planner of a configuration
run           one run: its folder, its overrides, its summary.json, and whether it goes on
multiprocess  runs a command in one process or in several, which it checks, in the precision that it names
screen        what is printed and logged
comparison    what compares runs: what a sweep optimises and its table, TensorBoard's HParams and Custom Scalars
"""
