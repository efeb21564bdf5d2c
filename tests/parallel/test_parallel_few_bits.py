"""Optimizers that need little memory on two processes and on one, and their checkpoints (ranks_of_few_bits.py)."""

from pathlib import Path

import pytest
import torch.distributed as dist
from gloo_pair import found_by_processes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")


def test_two_processes_and_each_checkpoint_continue_as_one_process_does(tmp_path):
    """To the bit; Adafactor and Muon, whose sums are rounded, within 1e-9. No checkpoint has a tensor of a class of its own."""
    found = found_by_processes(Path(__file__).with_name("ranks_of_few_bits.py"), tmp_path)
    assert {kind: len(of) for kind, of in found.items()} == dict.fromkeys(
        ("adamw_8bit", "adamw_4bit", "adamw_fp8", "adafactor", "muon"), 2 + 3 * 5
    )
    assert {(kind, where): said for kind, of in found.items() for where, said in of.items() if said} == {}
