"""One of two or four gloo processes: saves sharded models and optimizers to sharded checkpoints and loads them.

    python ranks_that_save.py RANK STORE RESULTS

Not a test by itself: test_parallel_checkpoints.py starts it and reads what rank 0 wrote.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gloo_pair import find_as_one_of_them
from safetensors import safe_open
from small_models import IMAGE, TEXT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves_with_path

from holotrain.models.gpt import RevGPT
from holotrain.models.vit import RevViT
from holotrain.parallel.checkpoints import save_in_shards
from holotrain.parallel.sharded import shard
from holotrain.parallel.tensor import tensor_parallel
from holotrain.ranks.shards import Sharded, load, numbered, read
from holotrain.ranks.tensors import part_like, whole
from holotrain.tasks.optimizers import adamw

MODELS = {"vit": lambda: RevViT(**IMAGE), "gpt": lambda: RevGPT(**TEXT)}


def trained(model: torch.nn.Module) -> dict:
    """The state after two steps with gradients from a seed, independent of how the model is sharded."""
    optimizer = adamw(model, lr=0.1)
    for group in optimizer.param_groups:
        group["foreach"] = False
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = part_like(torch.randn(parameter.shape, generator=generator), parameter)
        optimizer.step()
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "step": 2}


def compared(kind: str, data: int, layers: int, folder: Path) -> dict:
    torch.manual_seed(0)
    model = MODELS[kind]()
    alone = dict(tree_leaves_with_path(trained(copy.deepcopy(model))))
    mesh = init_device_mesh("cpu", (data, layers), mesh_dim_names=("data", "layers"))
    if layers > 1:
        tensor_parallel(model, mesh["layers"])
    if data > 1:
        shard(model, mesh["data"])
    state = trained(model)
    path = folder / f"{kind}-{data}-{layers}.ckpt"
    save_in_shards(state, path)
    dist.barrier()
    kept, unequal, numbers = dict(tree_leaves_with_path(load(path))), [], 0
    for key, value in tree_leaves_with_path(state):
        in_shards, found = isinstance(kept[key], Sharded), read(kept[key])
        if in_shards != isinstance(value, DTensor):
            unequal.append(f"{key}: {kept[key]}")
        if isinstance(value, torch.Tensor):
            full = whole(value)
            # Compared with one process: AdamW rounds differently where vectors end at other places.
            if not torch.equal(found, full) or not torch.allclose(found, alone[key], rtol=1e-5, atol=1e-6):
                unequal.append(str(key))
            numbers += in_shards * full.numel()
        elif found != value:
            unequal.append(str(key))
    (shards,) = numbered(path).values()
    files = [safe_open(file, "pt") for file in sorted(shards.iterdir())]
    written = [sum(file.get_tensor(name).numel() for name in file.keys()) for file in files]  # noqa: SIM118
    return {"unequal": unequal, "keys": len(kept), "numbers": numbers, "written": written, "torch": read_by_torch(shards, kept)}


def read_by_torch(shards: Path, kept: dict) -> bool:
    """Whether torch's reader gets the same tensors from the shards as ours."""
    plain = {x.name: x for x in kept.values() if isinstance(x, Sharded) and x.stacks == 1}
    state = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in plain.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(shards)), no_dist=True)
    return all(torch.equal(state[name], x.read()) for name, x in plain.items())


def find(rank: int) -> dict:
    folder, size = Path(sys.argv[3]).parent, dist.get_world_size()
    meshes = {2: [(2, 1), (1, 2)], 4: [(2, 2)]}[size]
    cases = [(kind, data, layers) for kind in MODELS for data, layers in meshes]
    return {f"{kind}, fsdp {data}, tp {layers}": compared(kind, data, layers, folder) for kind, data, layers in cases}


if __name__ == "__main__":
    find_as_one_of_them(find)
