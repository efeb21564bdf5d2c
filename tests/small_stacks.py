"""Small models whose blocks recompute takes, and all that a model may do with its blocks."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from holotrain.reversible import recompute

WIDTH, DEPTH, TOKENS = 8, 6, 5


class Block(nn.Module):
    """A pre-norm block of a transformer; ``post``: normed after each branch, as in BERT."""

    def __init__(self, post=False, dropout=0.1):
        super().__init__()
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.qkv, self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.post = post

    def attention(self, x, mask):
        q, k, v = self.qkv(x).unsqueeze(-3).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask.to(q.dtype)).squeeze(-3)

    def mlp(self, x):
        return self.outer(self.dropout(torch.tanh(self.inner(x))))

    def forward(self, x, mask=None, context=None):
        if self.post:
            x = self.norm1(x + self.attention(x, mask))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Biased(Block):
    """As T5: the first block computes a position bias, which it returns and later ones read."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(TOKENS, TOKENS))

    def forward(self, x, mask=None, context=None):
        context = self.bias.sigmoid() * x.mean() if context is None else context
        return super().forward(x, context[: x.shape[-2], : x.shape[-2]]), context


class TwoStreams(Block):
    """As MMDiT and Flux: two streams are updated from each other."""

    def forward(self, x, mask=None, context=None):
        context = x.mean(-2, keepdim=True) if context is None or context.dim() != x.dim() else context
        mixed = super().forward(torch.cat((x, context.to(x.dtype)), -2))
        return self.returned(mixed[..., :-1, :], context + mixed[..., -1:, :])

    def returned(self, *streams):
        return streams


class Listing(TwoStreams):
    def returned(self, *streams):
        return [*streams]


class Returned(NamedTuple):
    hidden: torch.Tensor
    context: torch.Tensor


class Naming(TwoStreams):
    def returned(self, *streams):
        return Returned(*streams)


BLOCKS = {
    "pre-norm": Block,
    "post-norm": lambda: Block(post=True),
    "a position bias": Biased,
    "two streams": TwoStreams,
    "a list": Listing,
    "a named tuple": Naming,
}


class Model(nn.Module):
    """A stem, blocks one after another, and a head.

    Args:
        around: what it does around its blocks, an entry of ``AROUND``: called with the model, the number of the next block, its
            input, and that of the first block; returns another input, or None to leave out the block.
        within: the context of the call of a block of that number, an entry of ``WITHIN``.
    """

    def __init__(self, block=Block, depth=DEPTH, around="nothing", seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(block() for _ in range(depth))
        self.mask, self.around = nn.Parameter(torch.zeros(TOKENS, TOKENS)), around

    def forward(self, x):
        x = first = self.stem(x)
        context, handles = None, hooks_for_the_forward(self) if self.around == "hooks for the forward" else []
        for index, layer in enumerate(self.layers):
            changed = AROUND.get(self.around, keep)(self, index, x, first)
            if changed is None:
                continue
            x = changed
            mask = self.mask[: x.shape[-2], : x.shape[-2]]
            if self.around == "a mask from the stream":
                mask = mask + x.mean()
            with WITHIN.get(self.around, lambda index: nullcontext())(index):
                out = layer(x, mask=mask, context=context)
            x, context = out if isinstance(out, tuple | list) else (out, None)
        for handle in handles:
            handle.remove()
        return self.head(x if context is None else x * context.float().to(x.dtype).mean())


def keep(model, index, x, first):
    return x


def leaving_out(*without):
    return lambda model, index, x, first: None if index in without else x


def at(*places):
    """Another stream before some blocks."""

    def places_of(change):
        return lambda model, index, x, first: change(model, index, x, first) if index in places else x

    return places_of


def repeats(model, index, x, first):
    out = model.layers[index](x, mask=model.mask)
    return out[0] if isinstance(out, tuple | list) else out


AROUND = {
    "leaves out the first": leaving_out(0),
    "leaves out the third": leaving_out(2),
    "leaves out every other": leaving_out(1, 3, 5),
    "stops early": leaving_out(3, 4, 5),
    "runs one": leaving_out(0, 1, 2, 3, 4),
    "runs none": leaving_out(*range(DEPTH)),
    "adds": at(3)(lambda model, index, x, first: x + first),
    "adds often": at(1, 2, 5)(lambda model, index, x, first: x + first),
    "writes": at(3)(lambda model, index, x, first: x.mul_(2)),
    "repeats": at(2)(repeats),
    "shortens": at(1, 3)(lambda model, index, x, first: x[..., 1:, :]),
    "unsqueezes": at(2, 3)(lambda model, index, x, first: x.unsqueeze(0) if x.dim() == 3 else x.squeeze(0)),
    "detaches": at(3)(lambda model, index, x, first: x.detach()),
}
WITHIN = {
    "casts": lambda index: torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0),
    "casts later": lambda index: torch.autocast("cpu", torch.bfloat16, enabled=index >= 2),
    "freezes the third": lambda index: torch.set_grad_enabled(index != 2),
    "freezes the first": lambda index: torch.set_grad_enabled(index > 1),
}
PLACES = ["nothing", *AROUND, *WITHIN, "a mask from the stream", "hooks for the forward", "a hook edits"]


def hooks_for_the_forward(model):
    """Registers hooks for the time of its forward, as peft does."""
    handles = []
    for number, layer in enumerate(model.layers):
        scale = lambda module, args, number=number: (args[0] * (1 + number),)  # noqa: E731
        shift = lambda module, args, kwargs: ((args[0] + 1,), kwargs)  # noqa: E731
        handles += [
            layer.inner.register_forward_pre_hook(scale),
            layer.inner.register_forward_pre_hook(shift, with_kwargs=True),
            layer.outer.register_forward_hook(lambda module, args, output: output * 2),
        ]
    return handles


def model(block="pre-norm", around="nothing", dtype=torch.float64, depth=DEPTH):
    net = Model(BLOCKS[block], depth, around).to(dtype)
    if around == "a hook edits":
        net.steer = nn.Parameter(torch.full((WIDTH,), 0.1, dtype=dtype))
        edited = lambda out: (out[0] + net.steer, out[1]) if isinstance(out, tuple | list) else out + net.steer  # noqa: E731
        net.layers[1].register_forward_hook(lambda module, args, out: edited(out))
    return net


def recomputed(net=None, backward="checkpoint"):
    return recompute(model() if net is None else net, "layers", backward=backward)


def inputs(dtype=torch.float64, seed=1):
    return torch.randn(3, TOKENS, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def once(net, run):
    run(inputs()).backward()


def retained(net, run):
    loss = run(inputs())
    loss.backward(retain_graph=True)
    with torch.inference_mode():
        loss.backward()


def two_forwards(net, run):
    (run(inputs()) + 2 * run(inputs(seed=2)[:2])).backward()


NOT_AGAIN = "leaves out the first", "runs one", "repeats", *WITHIN
"""What torch.utils.checkpoint cannot run again."""


def within_a_checkpoint(net, run):
    """A reference without gradients may run between its forward and its backward."""
    if net.around in NOT_AGAIN:
        return once(net, run)
    loss = checkpoint(run, inputs().requires_grad_(), use_reentrant=False)
    with torch.no_grad():
        run(inputs())
    loss.backward()


def second_derivative(net, run):
    with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
        x = inputs().requires_grad_()
        (grad,) = torch.autograd.grad(run(x), x, create_graph=True, allow_unused=True)
    if grad is not None and grad.requires_grad:
        grad.square().sum().backward()


USES = {
    "once": once,
    "retained graph": retained,
    "two forwards": two_forwards,
    "within a checkpoint": within_a_checkpoint,
    "second derivative": second_derivative,
}


def gradients(net, use="once", steps=2, amp=False, run=None):
    """Of each of some steps.

    Args:
        run: from an input, what is differentiated; None: the model.
    """
    dtype, found = next(net.parameters()).dtype, {}

    def loss_of(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return (run or net)(x.to(dtype)).double().sin().sum()

    for step in range(steps):
        net.zero_grad()
        torch.manual_seed(step)
        USES[use](net, loss_of)
        found |= {f"{step} {name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return found
