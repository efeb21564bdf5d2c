"""Files that commands write."""

import csv

import pytest

from holotrain.commands.files import write_table


@pytest.mark.parametrize("formula", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\r=1"])
def test_a_spreadsheet_runs_nothing_in_a_table(tmp_path, formula):
    write_table(tmp_path / "table.csv", ["text", "bytes"], [[formula, 3]])
    assert list(csv.reader((tmp_path / "table.csv").open(newline=""))) == [["text", "bytes"], [f"'{formula}", "3"]]


def test_numbers_and_other_texts_are_written_as_they_are(tmp_path):
    rows = [["-0.5", "+1e3"], ["a, b", 'say "x"'], ["1=1", ""]]
    write_table(tmp_path / "table.csv", ["one", "two"], [[-1.5, None], *rows])
    assert list(csv.reader((tmp_path / "table.csv").open(newline=""))) == [["one", "two"], ["-1.5", ""], *rows]
