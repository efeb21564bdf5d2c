"""One of two gloo processes that train a model under FSDP2 in bf16-mixed, and record what they send.

Not a test by itself: test_parallel_precision.py starts it twice.
"""

from unittest.mock import patch

import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them
from small_models import IMAGE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from holotrain.models.vit import RevViT
from holotrain.parallel.strategies import HALF, shard

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


find_as_one_of_them(find)
