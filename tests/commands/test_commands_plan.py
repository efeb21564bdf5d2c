"""What ``plan`` prints, and what a sweep reads of its figures."""

import json
from types import SimpleNamespace

import pytest
from rich.status import Status

from holotrain.commands import plan as command
from holotrain.commands.plan import PLAN
from holotrain.errors import UserError


def test_a_plan_that_does_not_say_whether_it_fits_is_refused(tmp_path):
    """What is null fits nowhere in particular: the memory is not known."""
    found = {"backward": "reversible", "fits": None, "peak_bytes": 5, "largest": {}}
    (tmp_path / PLAN).write_text(json.dumps(found))
    assert command.row(tmp_path)["fits"] == ""
    del found["fits"]
    (tmp_path / PLAN).write_text(json.dumps(found))
    with pytest.raises(UserError, match=f"{PLAN} is not the plan of a run: it has no 'fits'"):
        command.row(tmp_path)


@pytest.mark.parametrize("target", [None, "-"])
def test_what_is_printed_while_data_are_read_is_not_taken_over(monkeypatch, target):
    """As the display of a terminal does; and none is shown if stdout holds the figures."""
    shown = []

    def planned(config, say, begin):
        assert not shown
        begin("the step")
        assert bool(shown) == (target is None)
        raise UserError("seen")

    monkeypatch.setattr(Status, "start", lambda self: shown.append(True))
    monkeypatch.setattr(command, "planned", planned)
    with pytest.raises(UserError, match="seen"):
        command.run(SimpleNamespace(json=target), None)
