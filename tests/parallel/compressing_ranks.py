"""One of two gloo processes with PowerSGD: a training, and one that resumes from its middle.

Not a test by itself: test_parallel_powersgd.py starts it twice.
"""

import io

import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holotrain.parallel import powersgd
from holotrain.parallel.powersgd import PowerSGD

powersgd.WARM_UP = WARM_UP = 2
HALF, STEPS = 6, 12


class Training:
    """Three matrices in separate buckets, in float64, with momentum. Each process has its own batches."""

    def __init__(self, rank: int, compressed: bool = True) -> None:
        torch.manual_seed(0)
        shapes = [nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40, bias=False), nn.Tanh(), nn.Linear(40, 12)]
        self.model = nn.Sequential(*shapes).double()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.powersgd = PowerSGD(self.model.named_parameters())
        if compressed:
            self.ddp.register_comm_hook(self.powersgd, PowerSGD.send)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.rank, self.losses, self.ranks = rank, [], []

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(2 * step + self.rank)
            x = torch.randn(16, 24, dtype=torch.float64, generator=generator)
            loss = (self.ddp(x) - x[:, :12].sin()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.ranks.append(int(torch.linalg.matrix_rank(self.model[2].weight.grad)))
            self.optimizer.step()
            self.losses.append(loss.item())

    def saved(self) -> bytes:
        said = [self.powersgd.state_dict()]
        dist.broadcast_object_list(said, 0)  # from the first process only, like a file
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "powersgd": said[0]}
        held = io.BytesIO()
        torch.save(state, held)
        return held.getvalue()

    def load(self, held: bytes) -> None:
        state = torch.load(io.BytesIO(held), weights_only=True)
        for name, kept in state.items():
            getattr(self, name).load_state_dict(kept)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def apart(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def find(rank: int) -> dict:
    whole = Training(rank)
    whole.steps(0, HALF)
    kept = whole.saved()
    without = Training(rank)
    without.load(kept)
    without.powersgd.load_state_dict({"step": HALF, "errors": {}, "bases": {}})
    continued = Training(rank)
    continued.load(kept)
    for training in (whole, without, continued):
        training.steps(HALF, STEPS)
    early = Training(rank)
    early.steps(0, 1)
    again = Training(rank)
    again.load(early.saved())
    for training in (early, again):
        training.steps(1, STEPS)
    plain, unsaved = Training(rank, compressed=False), Training(rank)
    for training in (plain, unsaved):
        training.steps(0, STEPS)
    first = [weight.clone() for weight in whole.weights]
    for weight in first:
        dist.broadcast(weight, 0)
    return {
        "continued": apart(whole.weights, continued.weights),
        "forgetful": apart(whole.weights, without.weights),
        "from warm-up": apart(early.weights, again.weights),
        "between ranks": apart(whole.weights, first),
        "saving": apart(whole.weights, unsaved.weights),
        "plain": apart(whole.weights, plain.weights),
        "ranks": whole.ranks,
        "losses": whole.losses,
        "buckets": len(whole.powersgd.state.error_dict),
    }


if __name__ == "__main__":
    find_as_one_of_them(find)
