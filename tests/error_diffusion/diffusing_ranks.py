"""Two processes train by error diffusion with DDP on half of the batch each: python diffusing_ranks.py RANK STORE RESULTS."""

import torch
from gloo_pair import find_as_one_of_them
from torch.nn.parallel import DistributedDataParallel

from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.error_diffusion.rules import BACKPROPAGATION


def off_by(rank: int) -> dict[str, float]:
    """Maximum difference between the weights of two processes and of one, after three steps, by rule and depth."""
    found = {}
    for rule in ("kaneko", "article", BACKPROPAGATION):
        for depth in (1, 4):
            torch.manual_seed(0)
            alone = ErrorDiffusionNetwork(6, 3, 4, depth, rule).double()
            shared = ErrorDiffusionNetwork(6, 3, 4, depth, rule).double()
            shared.load_state_dict(alone.state_dict())
            parallel = DistributedDataParallel(shared)
            x, targets = torch.rand(3, 8, 6).double(), torch.rand(3, 8, 3).double()
            half = slice(4 * rank, 4 * rank + 4)
            for network, part in ((alone, slice(None)), (parallel, half)):
                optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
                for step in range(3):
                    optimizer.zero_grad()
                    (0.5 * (network(x[step, part]) - targets[step, part]).square().sum(1).mean()).backward()
                    optimizer.step()
            pairs = zip(alone.parameters(), shared.parameters(), strict=True)
            found[f"{rule}, {depth}"] = max((one - other).abs().max().item() for one, other in pairs if one.numel())
    return found


if __name__ == "__main__":
    find_as_one_of_them(off_by)
