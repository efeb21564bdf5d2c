"""FSDP2 in bf16-mixed: what is sent, and what comes of it."""

from pathlib import Path

import pytest
import torch
import torch.distributed
from gloo_pair import found_by_processes

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


def test_blocks_are_gathered_in_bf16_and_reduced_in_fp32(tmp_path):
    found = found_by_processes(Path(__file__).with_name("ranks_in_half.py"), tmp_path)
    alone, own, half = (found[name] for name in ("alone", "own", "half"))

    # the matrices of blocks in half as many bytes; norms, biases, embedding and head in as many
    assert 0.5 * own["gathered"] < half["gathered"] < 0.7 * own["gathered"]
    assert half["reduced"] == own["reduced"] > 0
    for job in (own, half):
        assert job["streams"] == ["torch.float32"]
        assert job["loss"] == pytest.approx(alone["loss"], rel=1e-2)
        grad, reference = torch.tensor(job["grad"]), torch.tensor(alone["grad"])
        assert (grad - reference).norm() < 0.02 * reference.norm()
