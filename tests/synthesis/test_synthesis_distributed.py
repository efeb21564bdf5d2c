"""Synthesis under DDP and FSDP2 on two gloo processes against one process. As a script, this is one of the processes."""

import copy
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them, found_by_processes
from torch import nn

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.synthesis import HolographicSynthesis

BATCH, STEPS = 8, 5
UNEVEN = (5, 3)
"""Samples of each rank."""

CASES = {
    "associative": {},
    "shared": {"mode": "shared", "superpose": 4},
    "bind": {"mode": "bind"},
    "bind as published": {"mode": "bind", "representation": "flattened", "block_length": None},
    "split": {"split": "cpu"},
    "hadamard": {"transform": "hadamard", "mix": 0.2, "dtype": "bf16"},
    "every option": {"mode": "shared", "ema": 0.5, "key_ema": 0.5, "match_norm": True, "cosine_floor": 0.3, "subsample": 0.5},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [ReversibleBlock(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))) for _ in range(3)]
        self.stem, self.blocks, self.head = nn.Linear(16, 16), ReversibleSequence(blocks, "reversible"), nn.Linear(16, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head(sum(self.blocks(x, x.tanh())))


def trained(
    options: dict,
    rank: int | None,
    accumulate: int = 1,
    spoiled: bool = False,
    sharded: bool = False,
    stop: int | None = None,
) -> tuple[nn.Module, HolographicSynthesis]:
    """A model and its synthesis after training on full batches, or on this rank's part of each batch.

    Args:
        sharded: under FSDP2; otherwise under DDP.
        stop: a step before which a synthesis of a new state takes over, with the state of the one before.
    """
    torch.manual_seed(0)
    model = Model().double()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    net = model if rank is None or sharded else DistributedDataParallel(model)
    synthesis = HolographicSynthesis(model, **{"block_length": 32} | options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        if step == stop:
            kept = copy.deepcopy(synthesis.state_dict())
            synthesis.remove()
            synthesis = HolographicSynthesis(model, block_length=32, **options)
            synthesis.load_state_dict(kept)
        optimizer.zero_grad()
        for part in range(accumulate):
            x = torch.randn(BATCH, 16, dtype=torch.float64, generator=generator) + 0.3
            mine = x if rank is None else x.split(UNEVEN)[rank]
            last = part == accumulate - 1
            with nullcontext() if rank is None or sharded or last else net.no_sync():
                # Processes divide the sum of their gradients by their number.
                loss = net(mine).square().sum() * (1 if rank is None else 2) / (BATCH * accumulate)
                (loss * torch.nan if spoiled and step == 2 and rank in (None, 1) else loss).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            synthesis.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, synthesis


def compared(options: dict, rank: int, **how) -> dict:
    model, synthesis = trained(options, rank, **how)
    kept = torch.cat(
        [*(p.detach().flatten() for p in model.parameters()), *map(flat, synthesis.state_dict()["tensors"].values())]
    )
    ranks = [torch.empty_like(kept) for _ in range(2)]
    dist.all_gather(ranks, kept)
    alone, other = trained_alone(options, **how)
    return {"same on both": torch.equal(*ranks)} | differences(model.parameters(), synthesis, alone, other)


def trained_alone(options: dict, **how) -> tuple[nn.Module, HolographicSynthesis]:
    """As :func:`trained` in a single process."""
    with patch.object(dist, "is_initialized", lambda: False):
        return trained(options, None, **how)


def differences(parameters: Iterable[torch.Tensor], synthesis, alone: nn.Module, other) -> dict:
    pairs = zip(parameters, alone.parameters(), strict=True)
    return {
        "error": max((a - b).abs().max() / b.abs().max() for a, b in pairs).item(),
        "steps": [synthesis.steps, other.steps],
        "skipped": [synthesis.skipped, other.skipped],
    }


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()


SHARDED = {
    "FSDP2, blocks within shares": {"decay": 0.8, "match_norm": True, "mix": 0.1, "covers": lambda _, p: p.ndim > 1},
    "FSDP2, entries on one rank": {"subsample": 0.9, "match_norm": True, "covers": lambda name, _: name == "head.weight"},
    "FSDP2, NaN on one rank": {"covers": lambda _, p: p.ndim > 1},
}
"""Of weights whose blocks of entries each lie within the share of one process."""


def compared_in_shares(name: str, options: dict) -> dict:
    how = {"spoiled": "NaN" in name}
    model, synthesis = trained(options, dist.get_rank(), sharded=True, **how)
    again, _ = trained(options, dist.get_rank(), sharded=True, stop=3, **how)
    alone, reference = trained_alone(options, **how)
    whole, resumed = ([p.full_tensor() for p in of.parameters()] for of in (model, again))
    return {"same resumed": all(map(torch.equal, whole, resumed))} | differences(whole, synthesis, alone, reference)


def find(rank: int) -> dict:
    found = {name: compared(options, rank) for name, options in CASES.items()}
    found |= {name: compared_in_shares(name, options) for name, options in SHARDED.items()}
    found["accumulation 4"] = compared({}, rank, accumulate=4)
    found["NaN on one rank"] = compared({}, rank, spoiled=True)
    model = Model()
    fully_shard(model.head, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="head.weight is sharded by FSDP2 and stem.weight is not; cover either"):
        HolographicSynthesis(model)
    return found


def test_two_processes_train_as_one_does(tmp_path):
    """Under FSDP2 where no block of entries is in both."""
    found = found_by_processes(Path(__file__), tmp_path)
    assert len(found) == 12
    for case, figures in found.items():
        skipped = 1 if "NaN" in case else 0
        assert figures["error"] <= 1e-10, case
        assert figures["skipped"] == [skipped] * 2 and figures["steps"] == [5 - skipped] * 2, case
        if "FSDP2" in case:
            assert figures["same resumed"], f"{case}: resumed, not the uninterrupted training to the bit"
        else:
            assert figures["same on both"], f"{case}: weights and holograms"


if __name__ == "__main__":
    find_as_one_of_them(find)
