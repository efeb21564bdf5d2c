"""Turns a command line into data, models, tasks and trainers.

arguments           parses the command line
composition         what is asked of Hydra: options of the commands, resolvers, composed configurations
signatures          options, types and help texts of a class, read from its source
chosen              a class that a group names, with its arguments
schema              the options that are defined by dataclasses, and the checks across groups
folders             folders of runs
typed               a whole configuration: completed with defaults, checked, as dataclasses
checkpointed        what a checkpoint says of its run, checked
origin              the checkpoint that a command starts from, with the command line laid over it
trust               which classes a checkpoint may name
explain             Hydra's errors in one line
help                --help
build               builds data, models, tasks, optimizers, schedules and syntheses
build_trainer       builds trainers
build_callbacks     builds the callbacks and the loggers of a run
plans               what planning needs to know of a configuration
"""
