"""Turns a command line into data, models, tasks and trainers.

arguments           parses the command line
register            registers the options of the commands with Hydra
composition         finds and composes the configuration
signatures          options, types and help texts of a class, read from its source
chosen              a class that a group names, with its arguments
schema              the options that are defined by dataclasses, and the checks across groups
folders             folders of runs
checkpointed        the configuration inside a checkpoint, and overrides of it
trust               which classes a checkpoint may name
explain             Hydra's errors in one line
help                --help
build               builds data, models and tasks
build_optimization  builds optimizers, schedules and syntheses
build_trainer       builds trainers, callbacks and loggers
build_callbacks     builds the callbacks of a run
build_loggers       builds the loggers of a run
plans               what planning needs to know of a configuration
"""
