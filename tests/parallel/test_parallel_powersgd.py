"""PowerSGD between two processes: thin gradients, and a training that continues with what was left out of them."""

from pathlib import Path

import pytest
import torch.distributed
from gloo_pair import found_by_processes

from holotrain.parallel.powersgd import RANK

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by_processes(Path(__file__).with_name("compressing_ranks.py"), tmp_path_factory.mktemp("powersgd"))


def test_gradients_are_whole_at_first_and_thin_then(found):
    assert min(found["ranks"][:2]) > RANK and set(found["ranks"][2:]) == {RANK}
    assert found["plain"] > 1e-4 and found["losses"][-1] < found["losses"][0]


def test_processes_keep_the_same_weights(found):
    assert found["between ranks"] == 0


def test_a_training_continues_bit_for_bit(found):
    """Also where DDP has dealt parameters out to other buckets: it does so behind every run's first step."""
    assert found["buckets"] > 1
    assert (found["continued"], found["from warm-up"]) == (0, 0)
    assert found["forgetful"] > 1e-6  # so it was the state that made them equal


def test_saving_changes_nothing_but_rounding(found):
    assert found["saving"] < 1e-12
