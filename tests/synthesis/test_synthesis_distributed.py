"""Synthesis under DDP and FSDP2 on two gloo processes against one process: figures from two_ranks.py."""

from pathlib import Path

import pytest
import torch.distributed
from gloo_pair import found_by_processes

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")

CASES = [
    "associative",
    "shared",
    "bind",
    "bind as published",
    "split",
    "hadamard",
    "every option",
    "accumulation 4",
    "NaN on one rank",
]
SHARDED = [
    f"FSDP2, {which}"
    for which in ("shared", "shared, every option", "blocks within shares", "entries on one rank", "NaN on one rank")
]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return found_by_processes(Path(__file__).with_name("two_ranks.py"), tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize("case", [*CASES, *SHARDED])
def test_two_processes_train_as_one_does(found, case):
    """Under FSDP2 as one does whose layers are the rows of each process; as one does, where no block has rows of both."""
    assert found.keys() == {*CASES, *SHARDED, "a part sharded"}
    assert found[case]["error"] <= 1e-10
    skipped = 1 if "NaN" in case else 0
    assert found[case]["skipped"] == [skipped] * 2 and found[case]["steps"] == [5 - skipped] * 2


def test_a_model_that_is_sharded_in_part_is_refused(found):
    said = "head.weight is sharded by FSDP2 and stem.weight is not; cover either sharded parameters or whole ones"
    assert found["a part sharded"] == said


@pytest.mark.parametrize("case", CASES)
def test_weights_and_holograms_are_the_same_on_both(found, case):
    assert found[case]["same on both"]


@pytest.mark.parametrize("case", SHARDED)
def test_a_resumed_training_under_fsdp2_is_the_uninterrupted_one_to_the_bit(found, case):
    assert found[case]["same resumed"]
