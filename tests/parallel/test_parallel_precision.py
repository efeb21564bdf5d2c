"""FSDP2 in bf16-mixed: what is sent, and what comes of it. As a script, this is one of two gloo processes."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them, found_by_processes

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from small_models import IMAGE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from holotrain.models.vit import RevViT
from holotrain.parallel.strategies import HALF, OPTIONS, shard

GATHER, REDUCE = (
    next(name for name in names if hasattr(dist, name))
    for names in (("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor"))
)
"""What FSDP2 calls: with torch from 2.15 on, and before."""


def trained(policy, sharded: bool) -> dict:
    torch.manual_seed(0)
    model = RevViT(**IMAGE, backward="reversible")
    if sharded:
        shard(model, init_device_mesh("cpu", (2,)), policy)
    images, sent, streams = torch.rand(4, 1, 8, 8), {GATHER: 0, REDUCE: 0}, set()
    model.blocks.blocks[0].register_forward_pre_hook(lambda _, inputs: streams.update(str(x.dtype) for x in inputs[:2]))

    def counted(name):
        plain = getattr(dist, name)

        def send(*args, **options):
            given = args[1] if len(args) > 1 else options.get("input", options.get("input_tensor"))
            sent[name] += given.nbytes
            return plain(*args, **options)

        return patch.object(dist, name, send)

    with counted(GATHER), counted(REDUCE):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    found = {"loss": loss.item(), "grad": torch.cat([grad.flatten() for grad in grads]).tolist(), "streams": sorted(streams)}
    return found | {"gathered": sent[GATHER], "reduced": sent[REDUCE]}


def find(rank: int) -> dict:
    return {"alone": trained(None, False), "own": trained(None, True), "half": trained(HALF, True)}


@pytest.mark.skipif(not OPTIONS, reason="before torch 2.15 norms would be bf16, which LayerNorm on a CPU does not take")
def test_blocks_are_gathered_in_bf16_and_reduced_in_fp32(tmp_path):
    found = found_by_processes(Path(__file__), tmp_path)
    alone, own, half = (found[name] for name in ("alone", "own", "half"))

    # the matrices of blocks in half as many bytes; norms, biases, embedding and head in as many
    assert 0.5 * own["gathered"] < half["gathered"] < 0.7 * own["gathered"]
    assert half["reduced"] == own["reduced"] > 0
    for job in (own, half):
        assert job["streams"] == ["torch.float32"]
        assert job["loss"] == pytest.approx(alone["loss"], rel=1e-2)
        grad, reference = torch.tensor(job["grad"]), torch.tensor(alone["grad"])
        assert (grad - reference).norm() < 0.02 * reference.norm()


if __name__ == "__main__":
    find_as_one_of_them(find)
