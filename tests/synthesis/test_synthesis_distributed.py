"""Synthesis under DDP and FSDP2 on two gloo processes against one process: figures from holograms_of_two_ranks.py."""

from pathlib import Path

import pytest
import torch.distributed
from gloo_pair import found_by_processes

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return found_by_processes(Path(__file__).with_name("holograms_of_two_ranks.py"), tmp_path_factory.mktemp("two_ranks"))


def test_two_processes_train_as_one_does(found):
    """Under FSDP2 as one does whose layers are the rows of each process; as one does, where no block has rows of both."""
    assert len(found["cases"]) == 14
    for case, figures in found["cases"].items():
        skipped = 1 if "NaN" in case else 0
        assert figures["error"] <= 1e-10, case
        assert figures["skipped"] == [skipped] * 2 and figures["steps"] == [5 - skipped] * 2, case
        if "FSDP2" in case:
            assert figures["same resumed"], f"{case}: resumed, not the uninterrupted training to the bit"
        else:
            assert figures["same on both"], f"{case}: weights and holograms"


def test_a_model_that_is_sharded_in_part_is_refused(found):
    said = "head.weight is sharded by FSDP2 and stem.weight is not; cover either sharded parameters or whole ones"
    assert found["a part sharded"] == said
