"""Names of parameters, from one project's into another's."""

import re
from collections.abc import Iterable


def renamed_by(patterns: Iterable[tuple[str, str]], name: str) -> str:
    """The name after each of the (pattern, replacement) in turn."""
    for theirs, ours in patterns:
        name = re.sub(theirs, ours, name)
    return name
