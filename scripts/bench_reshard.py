"""Times how a checkpoint of many processes is planned, written and read by another number of processes.

    python scripts/bench_reshard.py
    python scripts/bench_reshard.py --ranks 128 256 512 --tensors 900 --json scripts/results/reshard_cpu.json

Needs torch and safetensors. Every process is played by this one, in a fake process group: each plans its part of FSDP2-like
tensors (those of GPT blocks, sharded by rows) and writes its file. Numbers are uint8 and small, so the times (of the CPU) are
those of planning, of headers and of many small pieces, not of the disk's bandwidth. With n ranks, *plan a part* and *write a
part* are of one rank, *plan together* is what rank 0 does with all plans before a save, and *read a part* is of one of n / 2
ranks.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_common import arguments, begin, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holotrain.models.checkpoint_files import CHECKPOINT, TENSORS, read

WIDTH = 512
BLOCK = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH)]
BLOCK += [(WIDTH,)] * 5
"""Shapes of a block: matrices and biases of attention and MLP, and norms."""


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parts(ranks: int, shapes: list[tuple[int, ...]]) -> dict[str, DTensor]:
    """The tensors of a rank, sharded by rows."""
    mesh = init_device_mesh("cpu", (ranks,))
    return {
        str(number): DTensor.from_local(torch.ones(rows // ranks, *rest, dtype=torch.uint8), mesh, [Shard(0)], run_check=False)
        for number, (rows, *rest) in enumerate(shapes)
    }


def measure(ranks: int, shapes: list[tuple[int, ...]], folder: Path) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}

    def timed(name: str, began: float) -> None:
        seconds.setdefault(name, []).append(time.process_time() - began)

    plans, planners = [], []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            planners.append(dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
            planners[-1].set_up_planner({f"state_dict.{name}": x for name, x in parts(ranks, shapes).items()})
            began = time.process_time()
            plans.append(planners[-1].create_local_plan())
            timed("plan a part", began)
    began = time.process_time()
    plans, _ = planners[0].create_global_plan(plans)
    timed("plan together", began)
    print(f"  {ranks} ranks planned", file=sys.stderr)

    writer = dcp.HuggingFaceStorageWriter(str(folder / f"{TENSORS}-1"), save_distributed=True)
    writer.set_up_storage_writer(True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    for planner, plan in zip(planners, plans, strict=True):
        began = time.process_time()
        writer.write_data(planner.finish_plan(plan), planner).wait()
        timed("write a part", began)
    plans.clear(), planners.clear()  # a rank that reads has none of them
    gc.collect()
    meta = {str(number): torch.empty(shape, dtype=torch.uint8, device="meta") for number, shape in enumerate(shapes)}
    torch.save({TENSORS: f"{TENSORS}-1", "state_dict": meta}, folder / CHECKPOINT)
    print(f"  {ranks} ranks written", file=sys.stderr)

    with as_rank(0, ranks // 2):
        here = {"state_dict": {name: x.zero_() for name, x in parts(ranks // 2, shapes).items()}}
        like = dict(torch.utils._pytree.tree_leaves_with_path(here))
        began = time.process_time()
        found = read(folder, like=like)
        timed("read a part", began)
        assert all(x.to_local().all() for x in found["state_dict"].values())
    began = time.process_time()
    found = read(folder)
    timed("read all", began)
    assert [tuple(x.shape) for x in found["state_dict"].values()] == shapes and all(
        x.all() for x in found["state_dict"].values()
    )
    return {name: median(of) for name, of in seconds.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 256, 512], help=f"divisors of {WIDTH}")
    parser.add_argument("--tensors", type=int, default=900)
    options = parser.parse_args()
    if wrong := [ranks for ranks in options.ranks if WIDTH % ranks or ranks < 2]:
        parser.error(f"--ranks: {wrong[0]} is not a divisor of {WIDTH} above 1")
    warnings.simplefilter("ignore")
    begun = begin(options)
    shapes, results = list(islice(cycle(BLOCK), options.tensors)), {}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            results[ranks] = measure(ranks, shapes, Path(folder))
        print(f"{ranks:4} ranks: " + ", ".join(f"{name} {of:.2f} s" for name, of in results[ranks].items()), flush=True)
        save(begun | {"seconds": results}, options.json)


if __name__ == "__main__":
    main()
