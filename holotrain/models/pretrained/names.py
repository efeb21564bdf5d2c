"""Renaming of parameters by patterns."""

import re
from collections.abc import Iterable


def renamed_by(patterns: Iterable[tuple[str, str]], name: str) -> str:
    """The name after applying each (pattern, replacement) in order."""
    for theirs, ours in patterns:
        name = re.sub(theirs, ours, name)
    return name
