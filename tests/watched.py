"""Notes and refuses what leaves this process: addresses that are asked, programs that are started, a file that is secret."""

import os
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

OUTSIDE = {
    *("socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto", "socket.sendmsg", "urllib.Request"),
    *("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn", "os.startfile"),
}
"""Names of Python's audit events, which no library can go around by functions of Python's."""

_watching: tuple[list[str], str] | None = None


def _hook(event: str, arguments: tuple) -> None:
    if _watching is None:
        return
    noted, secret = _watching
    local = getattr(next(iter(arguments), None), "family", None) == socket.AF_UNIX
    opened = os.fsdecode(arguments[0]) if event == "open" and isinstance(arguments[0], str | bytes) else ""
    if (event in OUTSIDE and not local) or (opened and os.path.realpath(opened) == secret):
        noted.append(f"{event} {arguments[1:] if event.startswith('socket.c') else arguments}")
        raise OSError("refused by the test")


sys.addaudithook(_hook)


@contextmanager
def watched(secret: Path) -> Generator[list[str]]:
    """Yields what is noted; ``secret`` is a file that nothing may open."""
    global _watching
    import_module("matplotlib.font_manager")  # whose first import lists the fonts, for which it starts a program
    _watching = [], os.path.realpath(secret)
    try:
        yield _watching[0]
    finally:
        _watching = None
