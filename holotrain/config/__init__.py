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
plans          builds what planning analyzes
"""
