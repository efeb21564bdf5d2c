"""The options of each command, and the checks across groups.

The groups in ``run.OPEN`` and ``run.NAMED`` name any class or function, whose signature says what they take. The other options
are fields of dataclasses, which are signatures too: the string below a field is its help text. ``__post_init__`` checks what a
type cannot say. Nothing here imports torch, so that ``--help`` is fast.
"""
