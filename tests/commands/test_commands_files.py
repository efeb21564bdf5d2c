"""Files that commands write, and the folder that a run has for itself."""

import csv
import os
import signal
import subprocess
import sys

import pytest

from holotrain.commands.run_folder import alone_in
from holotrain.commands.writing import write_table
from holotrain.errors import UserError


def test_a_spreadsheet_runs_nothing_in_a_table_whose_other_cells_are_as_they_were(tmp_path):
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1", "\n=1"]
    cells = [-1.5, None, "-0.5", "+1e3", "a, b", 'say "x"', "1=1", ""]
    write_table(tmp_path / "table.csv", ["one", "=two"], [formulas, cells])
    written = ["'" + formula for formula in formulas], ["-1.5", "", *cells[2:]]
    assert list(csv.reader((tmp_path / "table.csv").open(newline=""))) == [["one", "'=two"], *written]


HOLD = """
import os, sys
from pathlib import Path
from holotrain.commands.run_folder import alone_in
with alone_in(Path(sys.argv[1])):
    if os.fork() == 0:  # as a data worker is; it outlives its parent here
        sys.stdin.read()
        os._exit(0)
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no fork and no such locks")
def test_one_run_at_a_time_is_in_a_folder_until_it_ends_or_dies(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"in\n"
        with pytest.raises(UserError, match="another run is writing into it"), alone_in(tmp_path):
            raise AssertionError
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with alone_in(tmp_path):
            with pytest.raises(UserError, match="another run is writing into it"), alone_in(tmp_path):  # of this process
                raise AssertionError
            assert (tmp_path / ".lock").exists()
        assert not tmp_path.exists()  # nothing was written
    finally:
        process.kill()
        process.stdin.close()
