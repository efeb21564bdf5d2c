"""Turns a command line into data, models, tasks and trainers, in this order.

command_line     from words, and the checkpoint that they name, to a checked configuration; --help
composition      what Hydra composes with: options of groups, primary configurations, the folders of a sweep's jobs
structured       what it composed as dataclasses with checked names and types, and back
signatures       options, types and help texts of a class, read from its source, as structured configs of OmegaConf
option_groups    the groups: what they name with its arguments, their own options, and which classes go together
command_options  the options of each command, and which of several groups go together
checkpointed     what a checkpoint says of its run, checked, and which classes it may name
build            what a run needs, in this order: device, data, model, task, trainer, callbacks, loggers
"""
