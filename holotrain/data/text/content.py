"""Hashes of file contents, without reading unchanged files again."""

import hashlib
import json
import time
from pathlib import Path
from uuid import uuid4

RACE = 2.0
"""Seconds. On file systems with coarse clocks, a file changed this recently may change again at the same modification time."""


class ContentHashes:
    """BLAKE2b hashes of files, kept in an index by path, size and modification time.

    Args:
        index: file that keeps the hashes between runs; an unreadable one counts as empty.
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
        """Writes new hashes into the index. If two processes do so at once, the hashes of one are lost."""
        if not self._new:
            return
        self._known |= self._new
        self._new = {}
        self._index.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._index.with_name(f".{self._index.name}.{uuid4().hex}")
        temporary.write_text(json.dumps(self._known), encoding="utf-8")
        temporary.replace(self._index)
