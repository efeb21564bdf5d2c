"""Turns a command line into data, models, tasks and trainers.

arguments      parses the command line
schema         every option, typed and explained
register       registers the schemas with Hydra
composition    finds and composes the configuration
folders        folders of runs
checkpointed   the configuration inside a checkpoint, and overrides of it
explain        Hydra's errors in one line
help           --help
build          builds data, models and tasks
build_trainer  builds trainers, callbacks and loggers
build_shown    builds the callbacks that log images, matrices, texts and norms

Planning and automatic choices:
budget           the memory budget of a run
build_plan       builds the training step that a plan analyzes
make_plan        memory under each backward, largest batch and depth
choose_backward  backward=auto
choose_batch     data.batch_size=auto
"""
