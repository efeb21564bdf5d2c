"""The picture of a plan against its figures."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from rich.status import Status

from holotrain.commands import plan as command
from holotrain.commands.plan import LEFT, PLAN, picture
from holotrain.commands.sweep import read_plan
from holotrain.errors import UserError
from holotrain.planning import Plan
from holotrain.planning.tracker import LASTING, Footprint

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"


def test_a_bar_ends_at_the_bound_which_may_lie_beyond_the_budget():
    parts = dict.fromkeys(LASTING, 0) | {"activations": 6 * MIB, "head": 0, "temporary": 2 * MIB}
    footprint = Footprint(8 * MIB, "backward", parts, {"backward": 8 * MIB}, {"backward": parts}, {"backward": 4 * MIB})
    plan = Plan("cpu", 10 * MIB, "autograd", "autograd", {"autograd": footprint}, None, [])
    drawn = ElementTree.fromstring(picture(plan))
    bar = {rect.find(f"{SVG}title").text: rect for rect in drawn.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None}
    scratch = bar["scratch: 4 MiB"]
    line = float(drawn.find(f"{SVG}line").get("x1"))
    start, end = float(scratch.get("x")), float(scratch.get("x")) + float(scratch.get("width"))
    assert not plan.fits and start < line < end
    assert (end - LEFT) / (line - LEFT) == pytest.approx(12 / 10, rel=1e-3)  # the file has one decimal
    assert {"12.00 MiB", "scratch"} <= {text.text for text in drawn.iter(f"{SVG}text")}


def test_a_plan_that_does_not_say_whether_it_fits_is_refused(tmp_path):
    """What is null fits nowhere in particular: the memory is not known."""
    found = {"backward": "reversible", "fits": None, "peak_bytes": 5, "largest": {}}
    (tmp_path / PLAN).write_text(json.dumps(found))
    assert read_plan(tmp_path)["fits"] == ""
    del found["fits"]
    (tmp_path / PLAN).write_text(json.dumps(found))
    with pytest.raises(UserError, match=f"{PLAN} is not the plan of a run: it has no 'fits'"):
        read_plan(tmp_path)


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
