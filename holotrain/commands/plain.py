"""A console that prints names of files and of options as they are, also those with ``[red]`` or ``:star:`` in them."""

from functools import partial

from rich.console import Console

plain = partial(Console, highlight=False, markup=False, emoji=False)
