"""DDP and FSDP2 on two gloo processes against one process: figures from two_processes.py."""

from pathlib import Path

import pytest
import torch.distributed
from gloo_pair import found_by_processes

DEPTH = 4

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return found_by_processes(Path(__file__).with_name("two_processes.py"), tmp_path_factory.mktemp("two_processes"))


@pytest.mark.parametrize("backward", ["checkpoint", "reversible", "pareprop"])
def test_gradients_equal_those_of_one_process(found, backward):
    errors = found["errors"][backward]
    assert len(errors) == (12 if backward == "reversible" else 6)
    assert max(errors.values()) <= 1e-12, errors


def test_gradients_of_recomputed_blocks_equal_those_of_stored_ones(found):
    assert len(found["recomputed"]) == 6
    assert set(found["recomputed"].values()) == {0.0}, found["recomputed"]


def test_gradients_of_a_loss_in_tiles_equal_those_of_one_process(found):
    """DDP, and FSDP2 with the head in the root's group and in one of its own."""
    pytest.importorskip("transformers")
    assert len(found["tiled"]) == 3 and max(found["tiled"].values()) < 1e-10, found["tiled"]


@pytest.mark.parametrize("backward", ["reversible", "pareprop"])
@pytest.mark.parametrize(("kind", "collective"), [("ddp", "all-reduce"), ("fsdp2", "reduce-scatter")])
def test_each_block_is_reduced_before_the_backward_ends(found, backward, kind, collective):
    """Between the recomputation of a block and that of the block two before it, its gradients are on their way."""
    order = found["orders"][backward][kind]
    assert collective in order[order.index(f"recompute {DEPTH - 1}") :]
    for block in range(2, DEPTH):
        begun, reached = order.index(f"recompute {block}"), order.index(f"recompute {block - 2}")
        assert collective in order[begun:reached], order


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fully_shard on f", "apply fully_shard to the ReversibleBlock"),
        ("streams cast to bf16", "cast_forward_inputs=False"),
        ("DDP within", "DistributedDataParallel inside a ReversibleBlock"),
        ("FSDP1 within", "FullyShardedDataParallel inside a ReversibleBlock"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(found, name, words):
    assert words in found["refused"][name]
