"""From words on a command line to objects.

arguments      the command line taken apart
schema         every option, typed and explained
checks         the checks that schemas are made of
register       tells Hydra of the schemas
composition    where the configuration lies, composing it
folders        where runs go
checkpointed   the configuration inside a checkpoint, and what a command line changes of it
explain        Hydra's complaints in one line
help           --help
build          configurations to data, models, tasks
build_trainer  configurations to trainers, callbacks, loggers
"""
