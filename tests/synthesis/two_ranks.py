"""One of two gloo processes: trains with DDP and synthesis; rank 0 compares with one process on the whole batch.

    python two_ranks.py RANK STORE RESULTS

Not a test by itself: test_synthesis_distributed.py starts it twice and reads what rank 0 wrote.
"""

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.synthesis import HolographicSynthesis

BATCH, STEPS = 8, 5
CASES = {
    "associative": {},
    "shared": {"mode": "shared", "superpose": 4},
    "bind": {"mode": "bind"},
    "bind as published": {"mode": "bind", "representation": "flattened", "block_length": None},
    "split": {"split": "cpu"},
    "hadamard": {"transform": "hadamard", "mix": 0.2, "dtype": "bf16"},
    "every option": {
        "mode": "shared",
        "phase_only": True,
        "ema": 0.5,
        "match_norm": True,
        "cosine_floor": 0.3,
        "subsample": 0.5,
    },
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
    options: dict, rank: int | None, accumulate: int = 1, spoiled: bool = False
) -> tuple[nn.Module, HolographicSynthesis]:
    """A model and its synthesis after training on full batches, or on this rank's half of each batch."""
    torch.manual_seed(0)
    model = Model().double()
    net = model if rank is None else DistributedDataParallel(model)
    synthesis = HolographicSynthesis(model, **{"block_length": 32} | options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            x = torch.randn(BATCH, 16, dtype=torch.float64, generator=generator) + 0.3
            mine = x if rank is None else x.chunk(2)[rank]
            last = part == accumulate - 1
            with nullcontext() if rank is None or last else net.no_sync():
                loss = net(mine).square().mean() / accumulate
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
    processes = dist.is_initialized
    dist.is_initialized = lambda: False  # a single process
    alone, other = trained(options, None, **how)
    dist.is_initialized = processes
    differences = [(a - b).abs().max() / b.abs().max() for a, b in zip(model.parameters(), alone.parameters(), strict=True)]
    return {
        "same on both": torch.equal(*ranks),
        "error": max(differences).item(),
        "steps": [synthesis.steps, other.steps],
        "skipped": [synthesis.skipped, other.skipped],
    }


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()


def find(rank: int) -> dict:
    found = {name: compared(options, rank) for name, options in CASES.items()}
    found["accumulation 4"] = compared({}, rank, accumulate=4)
    found["NaN on one rank"] = compared({}, rank, spoiled=True)
    return found


if __name__ == "__main__":
    find_as_one_of_them(find)
