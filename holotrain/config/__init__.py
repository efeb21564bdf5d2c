"""From words on a command line to objects.

arguments      the command line taken apart
schema         every option, typed and explained
register       tells Hydra of the schemas
composition    where the configuration lies, composing it
folders        where runs go
checkpointed   the configuration inside a checkpoint, and what a command line changes of it
explain        Hydra's complaints in one line
help           --help
build          configurations to data, models, tasks
build_trainer  configurations to trainers, callbacks, loggers

What a configured training will take, and what it leaves open:
budget           the memory that a run may take
build_plan       a configuration to the step that a plan rehearses
make_plan        every backward, and how far the run can grow
choose_backward  backward=auto
choose_batch     a batch of auto
"""
