"""Models that are divided into stages: the same numbers as in one process."""

from pathlib import Path

import pytest
from gloo_pair import found_by_processes
from small_models import IMAGE, TEXT, WINDOWS

from holotrain.models.gpt import GPT
from holotrain.models.swin import Swin
from holotrain.models.vit import RevViT
from holotrain.parallel.stages import check_stages


def test_a_step_in_three_stages_is_that_of_one_process(tmp_path):
    steps = found_by_processes(Path(__file__).with_name("ranks_in_stages.py"), tmp_path, 3)
    # What is drawn for data stays the same in all stages, whatever each drops.
    assert steps.pop("drawn") == {"after": True, "seeds": 3}
    assert len(steps) == 8
    for where, found in steps.items():
        assert max(found["loss"], found["evaluated"], found["grad"]) < 1e-13, (where, found)
        assert found["missing"] == 0 and 0.2 < found["own"] < 0.6, (where, found)  # each process has its own part


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: GPT(**TEXT | {"depth": 1}), "a model of 1 block cannot be divided into 2 stages"),
        (lambda: RevViT(**IMAGE, exact=True), "exact streams have one grid"),
        (lambda: Swin(**WINDOWS), "Swin cannot be divided"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(model, expected):
    with pytest.raises(ValueError, match=expected):
        check_stages(model(), 2)
