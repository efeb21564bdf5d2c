"""What files hold, as a hash, without reading unchanged ones again."""

import hashlib
import json
import time
from pathlib import Path
from uuid import uuid4

RACE = 2.0
"""Seconds: a file changed within them may change again without its time showing it, on file systems with coarse clocks."""


class ContentHashes:
    """BLAKE2b of files, remembered in an index by path, size and time of the last change.

    Args:
        index: file that keeps the hashes from run to run; one that cannot be read counts as empty.
    """

    def __init__(self, index: Path) -> None:
        self._index = index
        try:
            self._known: dict[str, list] = json.loads(index.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._known = {}
        self._new: dict[str, list] = {}

    def of(self, path: Path) -> str:
        """The hash of a file's content.

        Raises:
            OSError: it cannot be read.
        """
        state = path.stat()
        key, stamp = str(path.resolve()), [state.st_size, state.st_mtime_ns]
        if self._known.get(key, [])[:2] == stamp:
            return self._known[key][2]
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        if time.time() - state.st_mtime > RACE:
            self._new[key] = [*stamp, found]
        return found

    def save(self) -> None:
        """Writes what was learned into the index; of two processes that do so at once, one forgets."""
        if not self._new:
            return
        self._known |= self._new
        self._new = {}
        self._index.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._index.with_name(f".{self._index.name}.{uuid4().hex}")
        temporary.write_text(json.dumps(self._known), encoding="utf-8")
        temporary.replace(self._index)
