"""Folders that are built once, checked for damage, and named by a hash of what determines their content."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

from holotrain.data.text.content import ContentHashes

MANIFEST = "manifest.json"


def key_of(content: object) -> str:
    """The name of a folder: a hash of what determines its content, given as plain values."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()


def built(cache: Path, key: str, build: Callable[[Path], dict], hashes: ContentHashes) -> Path:
    """The folder ``cache/key``, which is built if it is missing or damaged.

    It is built under a temporary name and renamed when it is complete, so that no reader sees half of it. Processes that want
    the same folder wait for the one that builds it. If the file system has no locks, all of them build it, and the first to
    finish wins. Leftovers of builds that were killed are removed.

    Args:
        build: fills an empty folder and returns what the manifest holds besides the names, sizes and hashes of the files.
        hashes: remember which files have been checked.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = cache / key
    if intact(folder, hashes):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with lock(cache / f".{key}.lock") as locked:
        if intact(folder, hashes):  # another process was faster
            return folder
        if locked:
            sweep(cache)
            remove(cache, key)
        temporary = cache / f".{key}.building.{uuid4().hex}"
        temporary.mkdir()
        try:
            _seal(temporary, build(temporary), hashes)
            if folder.exists():
                folder.rename(temporary / "damaged")
            folder_is_there = _renamed(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if not folder_is_there:
            shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder / "damaged", ignore_errors=True)
    return folder


def manifest_of(folder: Path) -> dict:
    """The manifest of a folder.

    Raises:
        OSError, ValueError: it has none that can be read.
    """
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def intact(folder: Path, hashes: ContentHashes) -> bool:
    """Whether all files of the manifest are there and unchanged."""
    try:
        files = manifest_of(folder)["files"]
        return all((folder / name).stat().st_size == size for name, (size, _) in files.items()) and all(
            hashes.of(folder / name) == found for name, (_, found) in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sweep(cache: Path) -> None:
    """Removes what killed builds of other folders have left; a build in progress holds its lock."""
    for key in {path.name.split(".")[1] for path in cache.glob(".*.building.*")}:
        with lock(cache / f".{key}.lock", wait=False) as locked:
            if locked:
                remove(cache, key)


def remove(cache: Path, key: str) -> None:
    """Removes unfinished builds of a folder. The caller must hold its lock."""
    for left in cache.glob(f".{key}.building.*"):
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds a lock, which the system releases when the process ends. Yields False if it is not held or not supported here."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            yield False
            return
        yield True


def _seal(folder: Path, manifest: dict, hashes: ContentHashes) -> None:
    """Writes the manifest and flushes all files to the disk, so that a file that exists after a power cut is complete."""
    files = {path.name: [path.stat().st_size, hashes.of(path)] for path in sorted(folder.iterdir())}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest | {"files": files}, file, indent=1)
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _renamed(temporary: Path, folder: Path) -> bool:
    try:
        temporary.rename(folder)
    except OSError:  # another process has put its own folder there
        if not folder.is_dir():
            raise
        return False
    return True
