"""The engine's matrix: networks, keyword arguments, uses and schedules, which must all match plain autograd."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import torch
from engine_branches import BRANCHES, F64, REPEATABLE, WIDTH, Branch, ClosingBranch, DrawingBranch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.schedules import OF_REVERSIBLE

MIXED = ("reversible", "pareprop", "reversible+matmul", "checkpoint", "autograd")
ENGINES = {
    **{name: {"backward": name} for name in OF_REVERSIBLE[1:]},
    "storing the last": {"backward": "reversible", "store": 1},
    "storing every other": {"backward": "pareprop", "store": "even"},
    "keeping products": {"backward": "reversible", "keep": ("matmul",)},
    "a schedule a block": {"backward": MIXED},
}
"""Options of a sequence."""


def sequence(depth: int, dropout: float = 0.0, branch=Branch, engine: dict | None = None, **options) -> ReversibleSequence:
    """In float64.

    Args:
        engine: an entry of ``ENGINES``; None: plain autograd.
        options: other arguments of the sequence.
    """
    torch.manual_seed(depth)
    engine = {"backward": "autograd", **(engine or {}), **options}
    if isinstance(engine["backward"], tuple):
        engine["backward"] = [*islice(cycle(engine["backward"]), depth)]
    if "store" in engine:
        engine["store"] = range(0, depth, 2) if engine["store"] == "even" else engine["store"]
    return ReversibleSequence([ReversibleBlock(branch(dropout), branch(dropout)) for _ in range(depth)], **engine).double()


def block(net, index):
    return net.blocks[index % len(net.blocks)]


def train_adapters_only(net, stem):
    """A layer of one block, and a bias of another."""
    stem.requires_grad_(False)
    net.requires_grad_(False)
    block(net, 1).f.outer.requires_grad_(True)
    block(net, 2).g.outer.bias.requires_grad_(True)


def share_blocks(net, stem):
    net.blocks[2 % len(net.blocks)] = net.blocks[0]
    net.blocks[-1].g = net.blocks[-1].f


def hook_parameters(net, stem):
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: 2 * grad)


def hook_modules(net, stem):
    """Hooks that change values in forward and backward, and hooks on blocks that change nothing but draw."""
    block(net, 0).f.inner.register_forward_hook(lambda module, inputs, output: output * 1.5)
    block(net, 1).g.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    block(net, 2).g.outer.register_full_backward_hook(lambda module, into, out: tuple(2 * grad for grad in into))
    block(net, 2).register_full_backward_hook(lambda module, into, out: None)
    for each in net.blocks:
        each.register_forward_hook(lambda *_: random.random() and None)
        each.register_forward_pre_hook(lambda *_: torch.rand(3) is None or None)


def exchange(net, stem=None, after=lambda number: True):
    for number, each in enumerate(net.blocks):
        each.exchange = after(number)


NETWORKS = {
    "as it is": lambda net, stem: None,
    "evaluation": lambda net, stem: net.eval(),
    "frozen stem": lambda net, stem: stem.requires_grad_(False),  # RevTorch, xformers, revlib: no gradients at all
    "frozen blocks": lambda net, stem: net.blocks[::2].requires_grad_(False),
    "adapters only": train_adapters_only,
    "shared blocks": share_blocks,
    "tied to the stem": lambda net, stem: setattr(net.blocks[0].f, "inner", nn.Sequential(stem, net.blocks[0].f.inner)),
    "tensor hooks": hook_parameters,
    "module hooks": hook_modules,
    "exchange": exchange,
    "exchange after some": lambda net, stem: exchange(net, after=lambda number: number % 3 == 0),
}


def learned(*shape):
    return torch.linspace(-1, 1, shape[-1], dtype=F64).expand(shape).clone().requires_grad_()


def array(net):
    import numpy as np

    return [], {"scale": np.array([0.5])}, {}


def tensors(net):
    f, g = learned(2 * WIDTH), learned(3, 2 * WIDTH)
    return [f, g], {"bias": f}, {"bias": g}


def nested(net):
    gain = learned(2 * WIDTH)
    return [gain], {}, {"options": {"gains": [gain, 3]}}


def module(net):
    holder = nn.Linear(1, 1)
    holder.weight = nn.Parameter(learned(2 * WIDTH).detach())
    return [holder.weight], {"holder": holder}, {"holder": holder}


def one_for_each(net):
    biases = [learned(2 * WIDTH) for _ in net.blocks]
    return biases, [{"bias": bias, "scale": 0.5 + number} for number, bias in enumerate(biases)], None


def by_hooks(net):
    biases = [learned(2 * WIDTH) for _ in net.blocks]
    for each, bias in zip(net.blocks, biases, strict=True):
        each.register_forward_pre_hook(lambda module, inputs, bias=bias: (*inputs[:2], {"bias": bias}, *inputs[3:]))
    return biases, None, None


KEYWORDS = {
    "no keywords": lambda net: ([], None, None),
    "tensors": tensors,
    "numbers": lambda net: ([], {"scale": 0.5}, {"scale": -2.0}),
    "nested tensors": nested,
    "a generator": lambda net: ([], {"generator": torch.Generator().manual_seed(11)}, {}),
    "an array": array,
    "a module": module,
    "one for each block": one_for_each,
    "by hooks": by_hooks,
}
"""From the sequence: tensors that learn, and f_kwargs and g_kwargs that may hold them."""


USES = [
    "backward",
    "autograd.grad",
    "retained graph",
    "two forwards",  # RevTorch, xformers, Reformer: 41% with dropout
    "input alone",
    "one weight",
    "inner block",
    "second derivative",
    "within a checkpoint",
    "first stream",  # the last g then has no gradient
    "second stream",
]


def differentiated(use, net, run, x, leaves):
    """The loss and gradients; ``run`` returns the loss of an input."""
    if use in ("input alone", "second derivative"):
        x.requires_grad_()
    if use == "second derivative":  # a penalty on the gradient, as in WGAN-GP: the graph of a backward is differentiated
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
            loss = run(x)
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss, torch.autograd.grad(grad.square().sum(), leaves(), allow_unused=True)
    seen, hook = [], block(net, 2).register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    weight = block(net, 2).f.outer.weight
    if use == "one weight":
        weight.requires_grad_()
    elif use != "inner block":
        hook.remove()
    loss = run(x) + (2 * run(x + 1) if use == "two forwards" else 0)
    hook.remove()
    if use in ("input alone", "one weight"):
        return loss, torch.autograd.grad(loss, [x if use == "input alone" else weight])
    if use == "inner block":  # a loss on its features alone, and together with one on the output
        features = seen[-1].sin().sum()
        alone = torch.autograd.grad(features, leaves(), retain_graph=True, allow_unused=True)
        return loss, [*alone, *torch.autograd.grad(features + loss, leaves(), allow_unused=True)]
    if use == "autograd.grad":
        return loss, torch.autograd.grad(loss, leaves(), allow_unused=True)
    if use == "retained graph":
        loss.backward(retain_graph=True)
    loss.backward()
    return loss, [leaf.grad for leaf in leaves()]


def streams():
    return torch.linspace(-1, 1, 12 * WIDTH, dtype=F64).view(2, 2, 3, WIDTH).requires_grad_().unbind()


def loss_of(net, **keywords):
    y1, y2 = net(*streams(), **keywords)
    return (y1 * y2.sin()).sum()


FACTORS = {
    "engine": [*ENGINES],
    "branch": [*BRANCHES],
    "network": [*NETWORKS],
    "keywords": [*KEYWORDS],
    "use": USES,
    "dropout": [0.0, 0.3],  # memcnn: 90% with dropout
    "depth": [1, 2, 3, 4, 5, 9],  # minREV: depth 1 and every odd depth from 3
}


@dataclass
class Outcome:
    losses: list
    grads: list
    drawn: tuple
    buffers: list


def outcome(
    engine: dict | None,
    branch: Callable,
    network: str,
    keywords: str,
    use: str,
    dropout: float,
    depth: int,
    seed=0,
    device="cpu",
) -> Outcome:
    """Two steps: losses, gradients of all that learns, the random numbers that follow, and buffers."""
    torch.manual_seed(seed)
    random.seed(seed)
    with suppress(ModuleNotFoundError):  # a machine with torch and pytest alone runs the tests marked cuda
        import numpy as np

        np.random.seed(seed)
    net, stem = sequence(depth, dropout, branch, engine), nn.Linear(WIDTH, WIDTH).double()
    NETWORKS[network](net, stem)
    net.to(device), stem.to(device)
    outer = torch.linspace(-0.2, 0.2, WIDTH, dtype=F64, device=device).requires_grad_()
    for part in net.modules():
        if isinstance(part, ClosingBranch):
            part.read = partial(torch.exp, outer)
    learning, f_kwargs, g_kwargs = KEYWORDS[keywords](net)

    def run(x):
        streams, call = (stem(x), stem(x).tanh()), net
        # torch.utils.checkpoint does not repeat what a generator of one's own drew.
        if use == "within a checkpoint" and branch in REPEATABLE and keywords != "a generator":
            call = partial(checkpoint, net, use_reentrant=False)
        y1, y2 = call(*streams, f_kwargs=f_kwargs, g_kwargs=g_kwargs)
        of_one = {"first stream": y1, "second stream": y2}
        return of_one[use].sin().sum() if use in of_one else (y1 * y2.sin()).sum()

    def leaves():
        return list(dict.fromkeys(p for p in (outer, *learning, *stem.parameters(), *net.parameters()) if p.requires_grad))

    losses, grads = [], []
    for step in range(2):
        x = torch.randn(2, 3, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(step)).to(device)
        for leaf in leaves():
            leaf.grad = None
        loss, found = differentiated(use, net, run, x, leaves)
        losses.append(loss)
        grads += [None if grad is None else grad.clone() for grad in found]
    drawn = torch.rand(3, device=device).tolist(), random.random(), random.gauss(0, 1)
    own = [part.drawn() for part in net.modules() if isinstance(part, DrawingBranch)]
    return Outcome(losses, grads, (*drawn, own), list(net.buffers()))


def relative_error(result, reference) -> float:
    """The largest over all tensors of maximum difference / maximum magnitude; infinite if only one side has a gradient."""
    assert len(result) == len(reference)
    if any((a is None) != (b is None) for a, b in zip(result, reference, strict=True)):
        return float("inf")
    pairs = [(a, b) for a, b in zip(result, reference, strict=True) if a is not None]
    return max((((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in pairs), default=0.0)
