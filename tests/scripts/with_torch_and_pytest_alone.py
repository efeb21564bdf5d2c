"""Scripts of cuda_session.py read their arguments, and its tests are collected, where only torch and pytest can be imported.

Not a test by itself: test_cuda_session.py starts it.
"""

import argparse
import importlib
import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = {"torch", "torchgen", "functorch", "triton", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock"}
TORCH |= {"fsspec", "typing_extensions", "setuptools", "_distutils_hack", "nvidia", "cuda"}
PYTEST = {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"}


class OnlyThese:
    """Finds modules of Python, torch, pytest and this repository. Others look as if they were not installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or name.partition(".")[0] in TORCH | PYTEST:
            return spec
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations)
        return None if any("site-packages" in place for place in places) else spec


sys.meta_path[:] = [finder for finder in sys.meta_path if finder.__module__.startswith(("_frozen", "importlib"))]
sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyThese
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import pytest  # noqa: E402
from cuda_pieces import PIECES  # noqa: E402

for absent in ("numpy", "lightning", "hydra"):
    with pytest.raises(ModuleNotFoundError):
        __import__(absent)


class Read(Exception):
    """A script has read its arguments."""


parse = argparse.ArgumentParser.parse_args


def parse_and_stop(parser: argparse.ArgumentParser) -> None:
    parse(parser)
    raise Read


argparse.ArgumentParser.parse_args = parse_and_stop
free = [piece for piece in PIECES if not {*piece.needs} - {"pytest"}]
for script, *arguments in [command for piece in free for command in (piece.command, piece.command + piece.toy)]:
    sys.argv = [script, *arguments, "--json", "found.json"]
    with pytest.raises(Read):
        runpy.run_path(str(ROOT / script), run_name="__main__")
argparse.ArgumentParser.parse_args = parse
for module in ("cuda_session",):
    importlib.import_module(module)

from cuda_tests import TESTS, files_of  # noqa: E402

files, left_out = files_of(TESTS)
print("left out:", *(path.name for path in left_out))
sys.exit(pytest.main(["--collect-only", "-q", "-m", "cuda", "-p", "no:cacheprovider", *map(str, files)]))
