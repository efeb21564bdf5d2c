"""Tiles along the sequence for blocks of two streams, against plain autograd in float64 without tiles."""

from collections import Counter, defaultdict
from functools import partial

import pytest
import torch
from covering import chosen, name_of, pairwise, slow
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from tracked_memory import bytes_of_a_step

from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.schedules import OF_REVERSIBLE

B, T, WIDTH, F64 = 2, 11, 8, torch.float64
RECOMPUTING = OF_REVERSIBLE[1:]
every_schedule = pytest.mark.parametrize("backward", [slow("checkpoint"), "reversible"])


class Attention(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.qkv, self.outer = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, bias=None):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return self.outer(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


SEEN = defaultdict(list)
"""The numbers of tokens that each MLP got, by its id."""


class MLP(nn.Module):
    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        SEEN[id(self)] = []  # not those of an MLP that is gone
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, gain=1.0):
        SEEN[id(self)].append(x.shape[1])
        return self.dropout(self.narrow(self.dropout(F.gelu(self.widen(self.norm(x)))))) * gain


class InTilesItself(MLP):
    """Draws random numbers as an MLP does whose tiles are branches of their own."""

    def forward(self, x, gain=1.0):
        return torch.cat([MLP.forward(self, part.contiguous(), gain) for part in x.split(4, 1)], 1)


def blocks(mlp=MLP, depth=4, width=WIDTH):
    """MLPs as f and as g, and streams that are swapped or not."""
    for number in range(depth):
        branches = (Attention(width), mlp(width)) if number % 3 else (mlp(width), Attention(width))
        yield ReversibleBlock(*branches, exchange=number == 1)


def network(backward="autograd", tile=None, mlp=MLP, **options):
    torch.manual_seed(0)
    return ReversibleSequence(blocks(mlp), backward, tile=tile, **options).double()


def both_streams(y1, y2):
    return (y1 * y2.sin()).sum()


def gradients(net, loss=both_streams, run=None, use="once"):
    x = torch.randn(B, T, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(7)
    loss = loss(*(run or net)(x, x.sin()))
    if use == "input alone":
        return torch.autograd.grad(loss, x)
    if use == "twice":
        loss.backward(retain_graph=True)
    loss.backward()
    found = [x.grad, *(parameter.grad for parameter in net.parameters())]
    net.zero_grad()
    return found


def error(ours, true):
    """The largest relative error; gradients that are zero but for rounding, as those of the biases of keys, are left out."""
    assert [a is None for a in ours] == [b is None for b in true]
    pairs = [(a, b) for a, b in zip(ours, true, strict=True) if a is not None]
    largest = max(b.abs().max() for _, b in pairs)
    pairs = [(a, b) for a, b in pairs if max(a.abs().max(), b.abs().max()) > 1e-13 * largest]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def tokens_seen(net):
    """Of each MLP, since the last time."""
    found = []
    for part in net.modules():
        if isinstance(part, MLP):
            found.append(SEEN.pop(id(part), []))
    return found


LOSSES = {
    "both streams": both_streams,
    "some tokens": lambda y1, y2: y1[:, 2:5].square().sum(),
    "last tokens": lambda y1, y2: y2[:, -2:].square().sum(),
}
FACTORS = {
    "options": [
        *({"backward": backward} for backward in RECOMPUTING),
        {"backward": "reversible", "keep": ("matmul",)},
        {"backward": "pareprop", "keep": ("attention",)},
        {"backward": "reversible", "store": 2},
        {"backward": ["checkpoint", "reversible", "autograd", "pareprop+matmul"]},
    ],
    "tile": [4, 1, 3, T, 100],
    "loss": [*LOSSES],
    "use": ["once", "twice", "input alone", "checkpoint", "frozen"],
    "exact": [False, True, 20],
}


CASES = chosen(pairwise(*FACTORS.values()), lambda number, case: number % 4 == 0)


@pytest.mark.parametrize(tuple(FACTORS), CASES, ids=name_of)
def test_gradients_are_those_without_tiles(options, tile, loss, use, exact):
    net, plain = network(tile=tile, exact=exact, **options), network(exact=exact)
    found = []
    for each in (net, plain):
        if use == "frozen":
            each.blocks[0].f.requires_grad_(False)
            each.blocks[2].g.widen.requires_grad_(False)
        run = partial(checkpoint, each, use_reentrant=False) if use == "checkpoint" else None
        found.append([*gradients(each, LOSSES[loss], run, use), *gradients(each, LOSSES[loss], run, use)])
    assert error(*found) <= 1e-12
    if exact and use == "once":
        assert not any(each.item() for each in net.checks.errors)
    if use == "once" and options in FACTORS["options"][:3]:
        tokens_seen(net)  # in the first batch the branches are looked at, too
        gradients(net)
        sizes = [min(tile, T - start) for start in range(0, T, tile)]
        assert all(Counter(seen) == Counter(2 * sizes) for seen in tokens_seen(net))


@every_schedule
def test_tiles_draw_their_own_random_numbers_and_repeat_them(backward):
    ours = network(backward, 4, partial(MLP, dropout=0.3))
    true = network(mlp=partial(InTilesItself, dropout=0.3))
    gradients(ours)
    assert error(gradients(ours), gradients(true)) <= 1e-12
    state = torch.get_rng_state()
    gradients(true)
    assert torch.equal(torch.get_rng_state(), state)
    assert error(gradients(network(backward, 3, partial(MLP, dropout=0.3))), gradients(true)) > 0.01


class Casts(TorchDispatchMode):
    """Counts weights that are cast to bf16, by their shape."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].ndim == 2 and kwargs["dtype"] is torch.bfloat16:
            self.counted[tuple(args[0].shape)] += 1
        return function(*args, **(kwargs or {}))


@every_schedule
def test_autocast_casts_each_weight_as_often_as_without_tiles(backward):
    """And the trial leaves no weight in its cache, which would have no gradient."""

    def step(tile):
        net = network(backward, tile).float()
        x = torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            net.zero_grad()
            with Casts() as casts:
                with torch.autocast("cpu", torch.bfloat16):
                    y1, y2 = net(x, x.sin())
                (y1 * y2.sin()).sum().backward()
            assert all(parameter.grad is not None for parameter in net.parameters())
        return casts.counted, [parameter.grad for parameter in net.parameters()]

    (casts, ours), (whole, true) = step(4), step(None)
    assert casts == whole and casts[4 * WIDTH, WIDTH] == 2 * 4
    assert error(ours, true) <= 0.05


class Mixer(MLP):
    """Its last layer begins with zeros, so that its first output says nothing."""

    def __init__(self, width=WIDTH):
        super().__init__(width)
        nn.init.zeros_(self.narrow.weight)
        nn.init.zeros_(self.narrow.bias)

    def forward(self, x, gain=1.0):
        return super().forward(x, gain) + self.narrow(self.widen(x.cumsum(1)))


def test_what_does_not_work_token_by_token_is_taken_whole():
    nets = network("reversible", 4, Mixer), network(mlp=Mixer)
    for _ in range(2):
        assert error(*map(gradients, nets)) <= 1e-12
    tokens_seen(nets[0])
    gradients(nets[0])
    assert {tokens for seen in tokens_seen(nets[0]) for tokens in seen} == {T}


def test_keywords_that_hold_tensors_and_streams_of_other_ranks():
    net = ReversibleSequence([ReversibleBlock(MLP(), MLP())], tile=4).double()
    x = torch.randn(B, T, WIDTH, dtype=F64)
    gain = torch.ones(T, 1, dtype=F64, requires_grad=True)
    net(x, x, f_kwargs={"gain": gain}, g_kwargs={"gain": 2.0})
    assert tokens_seen(net)[0] == [T]
    for _ in range(2):  # in the first two calls it is looked at, too
        tokens_seen(net)
        net(x, x, f_kwargs={"gain": gain}, g_kwargs={"gain": 2.0})
    assert tokens_seen(net) == [[T], [4, 4, 3]]
    net(x.unsqueeze(2), x.unsqueeze(2))
    net(x[:, 0], x[:, 0])
    with torch.no_grad():
        net(x, x)
    assert {tokens for seen in tokens_seen(net) for tokens in seen} == {T, WIDTH}


class Both(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        y1, y2 = self.net(x, x)
        return y1 + y2


def test_the_peak_is_that_of_attention():
    def peak(tile):
        torch.manual_seed(0)
        return bytes_of_a_step(Both(ReversibleSequence(blocks(width=96, depth=4), tile=tile)), torch.randn(1, 512, 96))[0]

    assert peak(128) <= 0.8 * peak(None)


def of_tokens(count, net):
    x = torch.randn(B, count, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(1))
    return gradients(net, run=lambda *_: net(x, x.sin()))[1:]


@pytest.mark.slow
def test_compiled_branches():
    nets = [ReversibleSequence([ReversibleBlock(Attention(), MLP())], tile=4).double()]
    nets.append(ReversibleSequence(nets[0].blocks, "autograd"))
    plain = {tokens: of_tokens(tokens, nets[1]) for tokens in (8, T)}
    nets[0].blocks[0].g.compile(backend="aot_eager")
    for tokens in (8, 8, T):
        assert error(of_tokens(tokens, nets[0]), plain[tokens]) <= 1e-12
