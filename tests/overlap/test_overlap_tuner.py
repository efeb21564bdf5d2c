"""Choices measured once, kept, validated. Nothing is timed."""

import json
from dataclasses import replace

import pytest
import torch
from emulated_collectives import EmulatedCollectives

from holotrain.overlap import tuner as module
from holotrain.overlap.groups import COLLECTIVES, Job
from holotrain.overlap.predictor import Link, MeasuredLink
from holotrain.overlap.tuner import Tuner

LINK = Link(1e6, 1e-4)
JOB = Job(20, 4, 6, "all_reduce", 2, torch.float32, torch.device("cpu"))


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """What is measured, in order; the times are made up."""
    log = []

    def product(job, rows):
        log.append("product")
        return 1e-5 * rows

    def whole(job, sizes, collectives):
        log.append(f"{len(sizes)} groups")
        return 1.0 if len(sizes) == 1 else 0.5

    def link(collectives, job):
        log.append("link")
        return MeasuredLink({name: {8: 1e-6, 480: 2e-4} for name in COLLECTIVES})

    for name, function in {"product_seconds": product, "job_seconds": whole, "measured_link": link}.items():
        monkeypatch.setattr(module, name, function)
    return log


@pytest.fixture
def emulated() -> EmulatedCollectives:
    return EmulatedCollectives(LINK, 2)


def test_each_shape_is_measured_once_and_confirmed(measured, emulated, tmp_path):
    tuner = Tuner(tmp_path)
    sizes = tuner(JOB, emulated)
    assert sum(sizes) == 20 and len(sizes) > 1
    assert measured.count("link") == 1 and measured.count("product") == 10  # sizes of one to ten units
    assert measured[-2:] == [f"{len(sizes)} groups", "1 groups"]
    measured.clear()
    assert tuner(JOB, emulated) == sizes
    assert measured == []


def test_one_group_is_taken_where_the_predicted_groups_are_slower(measured, emulated, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "job_seconds", lambda job, sizes, collectives: float(len(sizes)))
    tuner = Tuner(tmp_path)
    assert tuner(JOB, emulated) == [20]
    (tuned,) = tuner.tuned.values()
    assert tuned.confirmed == tuned.in_one == 1.0


def test_a_choice_is_kept_in_a_file_of_its_own(measured, emulated, tmp_path):
    first = Tuner(tmp_path, LINK)
    sizes = first(JOB, emulated)
    assert "link" not in measured
    measured.clear()
    again = Tuner(tmp_path, LINK)
    assert again(JOB, emulated) == sizes and measured == []
    assert again.report() == first.report() and "0.500 s" not in again.report() and "500.000 ms" in again.report()
    Tuner(tmp_path)(JOB, emulated)  # another link
    again(replace(JOB, rows=21), emulated)
    assert len(list(tmp_path.iterdir())) == 3  # and nothing of a temporary name


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "{",
        lambda kept: json.dumps(kept | {"tuned": kept["tuned"] | {"sizes": [30, -10]}}),
        lambda kept: json.dumps(kept | {"tuned": kept["tuned"] | {"confirmed": "soon"}}),
        lambda kept: json.dumps(kept | {"of": {}}),
    ],
)
def test_a_broken_file_is_named_and_written_anew(measured, emulated, tmp_path, damage):
    sizes = Tuner(tmp_path)(JOB, emulated)
    (path,) = tmp_path.iterdir()
    kept = path.read_text()
    path.write_text(damage(json.loads(kept)))
    with pytest.warns(UserWarning, match="is not a valid choice of groups"):
        assert Tuner(tmp_path)(JOB, emulated) == sizes
    assert path.read_text() == kept
