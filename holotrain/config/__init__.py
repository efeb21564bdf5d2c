"""Turns a command line into data, models, tasks and trainers, in this order.

command_line     the words of a command line, and --help
signatures       options, types and help texts of a class, read from its source, as structured configs of OmegaConf
objects          a class or function that a group names, or an object of Python code, with its arguments
option_groups    the groups: their options beside those of classes, which classes go together, and the defaults of fine-tuning
command_options  the options of each command, and which of several groups go together
structured       a whole configuration: composed by Hydra, with all defaults, checked, as dataclasses
checkpointed     what a checkpoint says of its run, checked, and which classes it may name
start            from words, and the checkpoint that they name, to a checked configuration; the jobs of a sweep
build            what a run needs, in this order: data, model, task, trainer, callbacks, loggers
devices          the device of a run and its processes, checked, and when its trainer validates and logs
"""
