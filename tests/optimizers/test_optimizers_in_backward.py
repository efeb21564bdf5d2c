"""An optimizer that steps in the backward: the same weights to the bit, and what it refuses; and states in few bits."""

import copy
import io
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.tensor
from covering import chosen, paired, pairwise
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._pytree import tree_leaves

from holotrain.optimizers import InBackward
from holotrain.optimizers.low_bit import low_bit
from holotrain.optimizers.stepping import CombinedOptimizer, require_steps_alone
from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.schedules import OF_REVERSIBLE
from holotrain.tasks.optimizer_functions import ShardedAdafactor

WIDTH = 8


def branch():
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
    )


class Net(nn.Module):
    """Its embedding is tied to its head; ``shared``: its blocks share weights too."""

    def __init__(self, backward, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        blocks = [ReversibleBlock(branch(), branch()) for _ in range(3)]
        if shared:
            blocks[2].f = blocks[0].f
            blocks[1].g[1] = blocks[2].g[1]
        self.blocks = ReversibleSequence(blocks, backward=backward)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return nn.functional.linear(sum(self.blocks(x, x)), self.embedding.weight)


def sgd(net):
    return SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(net, **options):
    weights = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.01, **options)


def muon(net):
    matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if all(p is not matrix for matrix in matrices)]
    return CombinedOptimizer([AdamW(rest, lr=0.01), torch.optim.Muon(matrices, lr=0.01)])


OPTIMIZERS = {
    "sgd": sgd,
    "adamw": adamw,
    "foreach": lambda net: adamw(net, foreach=True),
    "fused": lambda net: adamw(net, fused=True),
    "muon": muon,
    "8 bits": lambda net: low_bit("AdamW8bit", net.parameters(), lr=0.01),
    "adafactor": lambda net: ShardedAdafactor(net.parameters()),
}


def train(net, optimizer, steps=range(4), half=False, schedule=None):
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(11, (10, 4, 6), generator=generator)
    for number in steps:
        torch.manual_seed(number)  # of dropout
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = nn.functional.cross_entropy(net(batches[number]).flatten(0, 1).float(), batches[number + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert not isinstance(optimizer, InBackward) or all(parameter.grad is None for parameter in net.parameters())
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


CASES = chosen(pairwise([*OPTIMIZERS], OF_REVERSIBLE, (False, True)), lambda number, case: number % 3 == 0)


@pytest.mark.parametrize(("name", "backward", "half"), CASES)
def test_weights_are_those_of_the_usual_step_to_the_bit(name, backward, half):
    make = OPTIMIZERS[name]
    for shared in (False, True):
        usual, net = Net(backward, shared), Net(backward, shared)
        optimizer = make(usual)
        expected = train(usual, optimizer, half=half, schedule=CosineAnnealingLR(optimizer, 5))
        optimizer = InBackward(make(net))
        found = train(net, optimizer, half=half, schedule=CosineAnnealingLR(optimizer, 5))
        assert same(found, expected)


@pytest.mark.parametrize(("make", "first"), paired([sgd, adamw, muon, OPTIMIZERS["8 bits"]], [False, True]))
def test_a_training_resumes_to_the_bit_with_it_and_without_it(make, first):
    def optimizer_of(net, in_backward):
        return InBackward(make(net)) if in_backward else make(net)

    whole = Net("reversible")
    expected = train(whole, make(whole), range(6))
    net = Net("reversible")
    before = optimizer_of(net, first)
    train(net, before, range(3))
    weights, state = copy.deepcopy((net.state_dict(), before.state_dict()))
    for then in (False, True):
        resumed = Net("reversible")
        resumed.load_state_dict(weights)
        after = optimizer_of(resumed, then)
        after.load_state_dict(copy.deepcopy(state))
        assert same(train(resumed, after, range(3, 6)), expected)


class Borrowing(nn.Module):
    """Reads the weight of another layer, without a gradient."""

    def __init__(self, lender):
        super().__init__()
        self.lender = lender

    def forward(self, x):
        return torch.tanh(x @ self.lender.weight.detach())


@pytest.mark.parametrize(("backward", "fused"), [*paired(OF_REVERSIBLE, [False, True]), ("reversible", True)])
def test_a_weight_that_is_needed_after_its_step_is_refused(backward, fused):
    lender = nn.Linear(WIDTH, WIDTH)
    net = ReversibleSequence(
        [ReversibleBlock(Borrowing(lender), branch()), ReversibleBlock(lender, branch())], backward=backward
    )
    optimizer = InBackward(AdamW(net.parameters(), fused=fused))
    x = torch.randn(2, WIDTH, requires_grad=True)
    words = "inplace operation" if backward == "autograd" else "an earlier block reads without a gradient"
    with pytest.raises(RuntimeError, match=words):
        sum(net(x, x)).sum().backward()
    del optimizer


def test_sharded_parameters_are_refused():
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        sharded = nn.Parameter(dist.tensor.distribute_tensor(torch.ones(2), mesh))
        with pytest.raises(ValueError, match="sharded parameters"):
            InBackward(SGD([sharded]))
        InBackward(SGD([nn.Parameter(torch.ones(2))]))  # one process
    finally:
        dist.destroy_process_group()


def test_what_needs_all_gradients_is_refused():
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="LBFGS steps all parameters together"):
        InBackward(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ValueError, match="clip_value 0 is out of range"):
        InBackward(SGD(net.parameters()), clip_value=0)
    with pytest.raises(ValueError, match="use one process"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        InBackward(SGD(net.parameters()))
    optimizer = InBackward(SGD(net.parameters(), lr=0.1))
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="cannot accumulate gradients"):
        net(torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()


def trained(model, optimizer, steps):
    for step in steps:
        given = torch.sin(torch.arange(6 * 96.0).view(6, 96) * (step + 1)).to(model[0].weight.dtype)
        loss = model(given).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 5))


@pytest.mark.parametrize(
    ("name", "dtype"), [("AdamW8bit", torch.float32), ("AdamW4bit", torch.bfloat16), ("AdamWFp8", torch.float64)]
)
def test_a_training_is_resumed_to_the_bit_from_plain_tensors(name, dtype):
    whole, model = model_of().to(dtype), model_of().to(dtype)
    expected = trained(whole, low_bit(name, whole.parameters(), lr=0.01), range(5))
    optimizer = low_bit(name, model.parameters(), lr=0.01)
    trained(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    held = torch.load(file, weights_only=True)
    assert sum(leaf.nbytes for leaf in tree_leaves(held["state"]) if torch.is_tensor(leaf)) < 20_000  # of 6,533 parameters
    assert {type(leaf) for leaf in tree_leaves(held)} <= {torch.Tensor, int, float, bool, str}
    assert held["state"][0]["exp_avg"]["codes"].itemsize == 1
    resumed = low_bit(name, model.parameters(), lr=0.01)
    resumed.load_state_dict(held)
    assert all(map(torch.equal, trained(model, resumed, range(3, 5)), expected))


FORGED = {
    "exp_avg is not of OptimState8bit": ("exp_avg", "tensor_class", "Module"),
    "exp_avg.codes is torch.int8 (64, 96), not torch.uint8": ("exp_avg", "codes", torch.zeros(64, 96).char()),
    "exp_avg.codes is missing or no tensor": ("exp_avg", "codes", [0] * 64),
    "exp_avg.codes is torch.uint8 (64, 96)": ("exp_avg", "codes", torch.zeros(64, 96).byte().to_sparse()),
    "exp_avg_sq.qmap is torch.float32 (16,), not torch.float32 (256,)": ("exp_avg_sq", "qmap", torch.zeros(16)),
    "step is torch.float32 (2,), not torch.float32 ()": ("step", torch.zeros(2)),
}
"""By what is said: the place of a value in the state, and what stands there instead."""


@pytest.mark.parametrize(("refusal", "forgery"), FORGED.items())
def test_forged_states_are_refused(refusal, forgery):
    model = model_of()
    optimizer = low_bit("AdamW8bit", model.parameters())
    trained(model, optimizer, range(1))
    forged = copy.deepcopy(optimizer.state_dict())
    *place, last, new = forgery
    where = forged["state"][0]
    for key in place:
        where = where[key]
    where[last] = new
    with pytest.raises(ValueError, match=re.escape(refusal)):
        optimizer.load_state_dict(forged)


class Coupled(torch.optim.SGD):
    """Steps by the norm of all gradients."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients]))
        for each in gradients:
            each /= norm
        super().step()


def test_an_optimizer_that_steps_parameters_together_is_refused():
    require_steps_alone(lambda model: torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="steps all parameters together"):
        require_steps_alone(lambda model: Coupled(model.parameters(), 0.1))
