"""Collects wheels that the command line needs on a machine with torch, transformers, timm, peft and Lightning but no network.

    python scripts/carried_wheels.py                          # from the index of pip into wheels/, and checks their size
    python scripts/carried_wheels.py --find-links FOLDER      # from a folder

The folder is carried along with the checkout. cuda_session.py unpacks those whose package is not installed and puts them on
PYTHONPATH. By hand: python -c "from carried_wheels import *; unpack(WHEELS, Path('unpacked'))", with PYTHONPATH=scripts, and
then PYTHONPATH=unpacked.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

WHEELS = Path(__file__).parents[1] / "wheels"
MOST_BYTES = 2**26

LACKING = ("hydra-core", "omegaconf", "antlr4-python3-runtime", "torchdata", "griffe", "griffelib", "griffecli", "rich")
LACKING += ("markdown-it-py", "mdurl", "pygments", "pytest", "pluggy", "iniconfig", "colorama")
"""What ``holotrain fit data=fake logger=none`` imports, and the tests, beyond what such a machine has."""

PLATFORM = ("--only-binary", ":all:", "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64")
PLATFORM += ("--platform", "manylinux2014_x86_64", "--platform", "any")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def collect(names: list[str], folder: Path, find_links: Path | None = None) -> int:
    """Puts the wheels of these packages, without what they depend on, into the folder. Returns the bytes of all in it.

    Raises:
        ValueError: a package has no wheel for the machine, or they are too large together.
    """
    source = ["--no-index", "--find-links", str(find_links)] if find_links else []
    pip, quiet = [sys.executable, "-m", "pip"], ["--no-deps", "--quiet", "--disable-pip-version-check", *source]
    for name in names:
        for earlier in folder.glob(f"{name.replace('-', '_')}-*.whl"):  # maybe of another version
            earlier.unlink()
        found = run([*pip, "download", *quiet, *PLATFORM, "--dest", str(folder), name])
        if found.returncode:  # some, such as antlr4, are published as sources alone
            found = run([*pip, "wheel", *quiet, "--wheel-dir", str(folder), name])
        if found.returncode:
            raise ValueError(f"{name}: {(found.stderr.strip() or 'pip failed').splitlines()[-1]}")
    wheels = list(folder.glob("*.whl"))
    if other := [path.name for path in wheels if "cp31" in path.stem.split("-")[-2] and "cp312" not in path.name]:
        raise ValueError(f"{', '.join(other)}: built for the Python of this machine")
    size = sum(path.stat().st_size for path in wheels)
    if size > MOST_BYTES:
        raise ValueError(f"{size / 2**20:.1f} MiB of wheels; {MOST_BYTES / 2**20:.0f} can be carried")
    return size


def unpack(wheels: Path, folder: Path) -> list[str]:
    """Unpacks the wheels whose package is not installed. Returns their names."""
    names = []
    for path in sorted(wheels.glob("*.whl")):
        name = re.sub(r"[-_.]+", "-", path.name.split("-")[0])
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            with zipfile.ZipFile(path) as packed:
                packed.extractall(folder)  # which keeps members within the folder
            names.append(name)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=LACKING, help=f"default: {' '.join(LACKING)}")
    parser.add_argument("--out", type=Path, default=WHEELS)
    parser.add_argument("--find-links", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        size = collect(list(options.names), options.out, options.find_links)
    except ValueError as error:
        parser.error(str(error))
    print(f"{size / 2**20:.1f} MiB in {options.out}: carry it beside scripts/, where cuda_session.py looks for it")


if __name__ == "__main__":
    main()
