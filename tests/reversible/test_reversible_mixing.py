"""Which modules may be taken in tiles: those that mix tokens never are, and what is cut equals the whole."""

import random
from unittest import TestCase

import pytest
import torch
from covering import long, slow
from torch import nn
from torch.nn import functional as F

from holotrain.reversible import recompute, undo
from holotrain.reversible.tiles import tile_modules
from holotrain.reversible.tokenwise import mixes_tokens, why_whole

B, T, WIDTH, TILE, F64 = 2, 24, 8, 8, torch.float64

pytestmark = pytest.mark.usefixtures("float64_stays")


class Layers(nn.Module):
    """Two linear layers, a gate of zero, and what a forward may need besides."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.zeros(()))
        self.seen, self.calls, self.kept = None, 0, []
        self.register_buffer("mean", torch.zeros(2 * WIDTH))
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def inner(layers, x):
    return F.gelu(layers.first(x))


def with_inner(function):
    """``second(function(layers, first(x)))``."""
    return lambda layers, x: layers.second(function(layers, inner(layers, x)))


def transposed(name):
    return lambda layers, h: getattr(layers, name)(h.transpose(1, 2)).transpose(1, 2)


def attention(layers, h):
    return F.scaled_dot_product_attention(h, h, h, is_causal=True)


def rotary(layers, h):
    return h * torch.arange(h.shape[1], dtype=h.dtype)[None, :, None].cos()


def global_response_norm(layers, h):
    norm = h.norm(dim=1, keepdim=True)
    return h * (1 + layers.gate * norm / norm.mean(-1, keepdim=True))


def experts_with_a_capacity(layers, h):
    best = h[..., :2].softmax(-1)[..., 0].topk(4, dim=1).indices[..., None].expand(-1, -1, h.shape[-1])
    return h.scatter_add(1, best, h.gather(1, best))


def experts_choose(layers, h):
    chosen = h[..., 0].sort(dim=1).values[:, -3:-2, None]
    return torch.where(h[..., :1] > chosen, 2 * h, h)


def long_convolution(layers, h):
    return torch.fft.irfft(torch.fft.rfft(h, 2 * T, 1) * torch.fft.rfft(layers.kernel, 2 * T, 0), 2 * T, 1)[:, :T]


def in_an_attribute(layers, h):
    layers.seen = h.softmax(-1).mean()
    return h


def in_a_list(layers, h):
    layers.kept.append(h.square().mean(-1))
    return h


def counted(layers, h):
    layers.calls += 1
    return h * layers.calls


def running_mean(layers, h):
    if layers.training:
        layers.mean.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return h - layers.mean


def folded(layers, h):
    return layers.narrow(h.reshape(B, h.shape[1] // 2, 2 * h.shape[2])).repeat_interleave(2, 1)


COMPOSED = {
    "attention": attention,
    "attention by hand": lambda layers, h: (h @ h.transpose(1, 2)).softmax(-1) @ h,
    "linear attention": lambda layers, h: h @ (h.transpose(1, 2) @ h),
    "rotary positions": rotary,
    "norm over tokens behind a gate of zero": global_response_norm,
    "Fourier": lambda layers, h: torch.fft.ifft(torch.fft.fft(h, dim=1) * 2, dim=1).real,
    "expert choice": experts_choose,
    "previous token": lambda layers, h: torch.cat((h[:, :1], h[:, :-1]), 1),
    "the first token": lambda layers, h: h + h[:, :1],
    "the number of tokens": lambda layers, h: h / h.shape[1],
    "drop path": lambda layers, h: h * (torch.rand(h.shape[0], 1, 1, dtype=h.dtype) > 0.5),
    "reshape across tokens": lambda layers, h: h.reshape(B, h.shape[2], h.shape[1]).softmax(1).reshape(h.shape),
    "an attribute": in_an_attribute,
    "a counter": counted,
    "sum of tokens": lambda layers, h: h.cumsum(1),
    "softmax over tokens": lambda layers, h: h.softmax(1),
    "turned": lambda layers, h: h.flip(1),
    "standard deviation": lambda layers, h: h / h.std(),
}
"""Functions between the two layers, of which random modules are composed, too."""
MIXING = COMPOSED | {
    "squeeze and excite": lambda layers, h: h * h.mean(1, keepdim=True).sigmoid(),
    "largest of all tokens": lambda layers, h: h - h.amax(1, keepdim=True),
    "largest with its place": lambda layers, h: h - h.max(1, keepdim=True).values,
    "softmax of all dimensions": lambda layers, h: h.flatten(1).softmax(-1).view_as(h),
    "capacity": experts_with_a_capacity,
    "rolled": lambda layers, h: h.roll(1, 1),
    "every second token": lambda layers, h: h[:, ::2].repeat_interleave(2, 1),
    "a list": in_a_list,
    "a running mean": running_mean,
    "values": lambda layers, h: h if h.sum() > 0 else 2 * h,
    "Python's random": lambda layers, h: h * random.random(),
    "outer product with positions": lambda layers, h: h + torch.linspace(0, 1, h.shape[1], dtype=h.dtype)[:, None],
    "median": lambda layers, h: h - h.median(1, keepdim=True).values,
    "masked mean": lambda layers, h: h - (h * (h > 0)).sum(1, keepdim=True) / (h > 0).sum(1, keepdim=True),
}
WITH_PARTS = {
    "token mixing": (transposed("tokens"), {"tokens": nn.Linear(T, T)}),
    "convolution": (transposed("tokens"), {"tokens": nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, padding=1)}),
    "long convolution": (long_convolution, {"kernel": nn.Parameter(torch.randn(T, 2 * WIDTH))}),
    "batch norm": (transposed("norm"), {"norm": nn.BatchNorm1d(2 * WIDTH)}),
    "instance norm": (transposed("norm"), {"norm": nn.InstanceNorm1d(2 * WIDTH)}),
    "group norm": (transposed("norm"), {"norm": nn.GroupNorm(2, 2 * WIDTH)}),
    "norm of tokens": (transposed("norm"), {"norm": nn.LayerNorm(T)}),
    "recurrence": (lambda layers, h: layers.cell(h)[0], {"cell": nn.GRU(2 * WIDTH, 2 * WIDTH, batch_first=True)}),
    "positions": (lambda layers, h: h + layers.table[: h.shape[1]], {"table": nn.Parameter(torch.randn(64, 2 * WIDTH))}),
    "two tokens at a time": (folded, {"narrow": nn.Linear(4 * WIDTH, 2 * WIDTH)}),
    "pooled": (transposed("pool"), {"pool": nn.AvgPool1d(3, stride=1, padding=1)}),
}
CHANGED_INPUT = (lambda layers, x: layers.second(layers.first(x.mul_(2)))), {}
ALL = {name: (with_inner(function), {}) for name, function in MIXING.items()} | {"a changed input": CHANGED_INPUT}
ALL |= {name: (with_inner(function), parts) for name, (function, parts) in WITH_PARTS.items()}


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def pair(make):
    """Two equal models of two blocks, the second in tiles."""
    models = []
    for tiled in (False, True):
        torch.manual_seed(0)
        models.append(nn.Sequential(Block(make()), Block(make())).double().train())
        if tiled:
            tile_modules(nn.ModuleList([models[-1]]), TILE)
    return models


def step(model, seed):
    x = torch.randn(B, T, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    torch.manual_seed(seed)
    random.seed(seed)
    model.zero_grad()
    y = model(x)
    (y * y.detach().cos()).sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def assert_equal(models, steps=2):
    for seed in range(steps):
        whole, tiled = (step(model, seed) for model in models)
        for a, b in zip(whole, tiled, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)
        with torch.no_grad():  # gates leave zero
            for model in models:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize("name", [name if place % 4 == 0 else slow(name) for place, name in enumerate(ALL)])
@pytest.mark.filterwarnings("ignore")
def test_what_mixes_tokens_is_taken_whole(name):
    function, parts = ALL[name]
    layers = Layers(function, **parts).double().train()
    assert mixes_tokens(layers, torch.randn(B, T, WIDTH, dtype=F64), {}) is not None
    assert_equal(pair(lambda: Layers(function, **parts)))


def in_groups(layers, h):
    h = h.unflatten(-1, (4, -1))
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2)


def experts_by_weight(layers, h):
    share = h[..., :2].softmax(-1)
    return sum(share[..., i : i + 1] * torch.pow(h, i + 1) for i in range(2))


APART = {
    "an MLP": lambda layers, h: h,
    "gated": lambda layers, h: torch.cat((h.chunk(2, -1)[0] * h.chunk(2, -1)[1].sigmoid(), F.silu(h.chunk(2, -1)[1])), -1),
    "norm": lambda layers, h: F.layer_norm(h, h.shape[-1:]) + F.rms_norm(h, h.shape[-1:]),
    "by hand": in_groups,
    "flat": lambda layers, h: h.reshape(-1, h.shape[-1]).relu().view_as(h),
    "transposed": lambda layers, h: h.transpose(1, 2).tanh().transpose(1, 2),
    "experts": experts_by_weight,
    "glu": lambda layers, h: torch.cat((F.glu(h), F.glu(h)), -1),
    "largest entry": lambda layers, h: h - h.amax(-1, keepdim=True) + h.logsumexp(-1, keepdim=True),
    "other dtypes": lambda layers, h: h.float().exp().to(h.dtype).clamp(max=3),
    "a gate": lambda layers, h: h * layers.gate.tanh() + layers.mean,
}


@pytest.mark.parametrize("name", [slow(name) if place % 3 == 1 else name for place, name in enumerate(APART)])
def test_what_keeps_tokens_apart_is_cut(name):
    layers = Layers(with_inner(APART[name])).double().train()
    assert mixes_tokens(layers, torch.randn(B, T, WIDTH, dtype=F64), {}) is None
    assert_equal(pair(lambda: Layers(with_inner(APART[name]))), steps=2 if name == "a gate" else 1)


def random_function(draw):
    """A few operations, some of which mix tokens."""
    apart, mixing = list(APART.values())[:-1], [each for each in COMPOSED.values() if draw.random() < 0.9]
    chosen = [draw.choice(mixing if draw.random() < 0.2 else apart) for _ in range(draw.randint(1, 4))]

    def function(layers, h):
        for each in chosen:
            h = each(layers, h) * 0.5
        return h

    return function


@pytest.mark.parametrize("seeds", [range(8), slow(range(8, 30)), long(range(30, 500))], ids=str)
def test_random_modules_equal_the_whole(seeds):
    cut = 0
    for seed in seeds:
        function = with_inner(random_function(random.Random(seed)))
        models = pair(lambda function=function: Layers(function))
        assert_equal(models, steps=1)
        cut += mixes_tokens(models[0][0].mlp, torch.randn(B, T, WIDTH, dtype=F64), {}) is None
    assert cut >= len(seeds) // 4


class Filling(Layers):
    def forward(self, x, cache=None):
        y = super().forward(x)
        cache.append(y)
        return y


class Cache:
    def __init__(self):
        self.held = []

    def append(self, each):
        self.held.append(each)


def test_an_object_among_the_keywords_is_not_touched():
    cache, layers = Cache(), Filling(with_inner(lambda layers, h: h)).double()
    reason = why_whole(layers, TILE, torch.randn(B, T, WIDTH, dtype=F64), {"cache": cache})
    assert reason == "it gets a Cache, which its forward may change" and not cache.held


def test_why_a_module_is_whole_is_logged_once():
    _, model = pair(lambda: Layers(with_inner(lambda layers, h: h.cumsum(1))))
    with TestCase().assertLogs("holotrain", "INFO") as logs:
        step(model, 0)
        step(model, 1)
    assert [record.message for record in logs.records] == [
        "Layers is taken whole, not in tiles: aten.cumsum.default may mix tokens"
    ]


def hides(layers, h):
    """What no look at its operators would find, because it changes between two calls."""
    return h.cumsum(1) if HIDDEN else h


HIDDEN: list[int] = []
SIZES: list[int] = []


def reads_its_gate(layers, h):
    SIZES.append(h.shape[1])
    return h * (1 + layers.gate.item())


def named(model):
    tile_modules(model, {"*.mlp": TILE})
    return model


@pytest.mark.filterwarnings("error")
def test_a_named_module_is_cut_unless_it_shows_that_it_mixes():
    torch.manual_seed(0)
    whole = nn.Sequential(Block(Layers(with_inner(in_groups))), Block(Layers(with_inner(reads_its_gate)))).double()
    SIZES.clear()
    with pytest.raises(ValueError, match=r"Sequential has no module of the name 'h\.\*'"):
        tile_modules(whole, {"h.*": TILE})
    with pytest.raises(ValueError, match="tile must be a number of tokens"):
        tile_modules(whole, {"*.mlp": 0})
    named(whole)
    step(whole, 0)
    assert SIZES[-1] == TILE
    mixing = named(pair(lambda: Layers(with_inner(lambda layers, h: h.cumsum(1))))[0])
    with pytest.warns(UserWarning, match="its first two tiles have other results by themselves"):
        step(mixing, 0)
    assert_equal([pair(lambda: Layers(with_inner(lambda layers, h: h.cumsum(1))))[0], mixing])


def test_a_module_that_begins_to_mix_is_noticed():
    """Two tiles are compared in the calls 1, 2, 4 ..., and operators looked at in the calls 1, 8, 64 ..."""
    models = pair(lambda: Layers(with_inner(hides)))
    assert_equal(models, steps=1)
    HIDDEN.append(1)
    try:
        with pytest.warns(UserWarning, match="Layers is taken whole, not in tiles: its first two tiles have other results"):
            assert_equal(models, steps=1)
        layers, x = Layers(with_inner(hides)).double(), torch.randn(B, T, WIDTH, dtype=F64)
        HIDDEN.clear()
        assert mixes_tokens(layers, x, {}) is None
        HIDDEN.append(1)
        found = [mixes_tokens(layers, x, {}) for _ in range(7)]
        assert found == [None] * 6 + ["aten.cumsum.default may mix tokens"]
    finally:
        HIDDEN.clear()


def drops(layers, h):
    SIZES.append(h.shape[1])
    return F.dropout(h, 0.5)


def counts_its_tokens(layers, h):
    layers.mean += h.shape[1]
    return h * (1 + layers.gate.item())


def test_what_is_compared_moves_no_generator_and_no_buffer():
    torch.manual_seed(0)
    model = named(nn.Sequential(Block(Layers(with_inner(drops)))).double())
    SIZES.clear()
    states = []
    for _ in range(3):  # the third call is not compared
        step(model, 0)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[2]) and SIZES.count(2 * TILE) == 2 and SIZES.count(TILE) == 3 * 2 * T // TILE
    counting = named(nn.Sequential(Block(Layers(with_inner(counts_its_tokens)))).double())
    step(counting, 0)
    assert counting[0].mlp.mean[0] == T


def a_view_of_a_buffer(layers, h):
    layers.mean[:1] += 1
    return h


class DividedByItsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1 + gradient.norm())


def clipped(layers, h):
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
    return h


LOOKED_AT = {
    (lambda layers, h: h * 0.5 if h.shape[1] > 2 * TILE else h): "it computes with the number of tokens",
    (lambda layers, h: h * 0.5 if h.shape[1] % 2 else h): "it computes with the number of tokens",
    a_view_of_a_buffer: "its forward changes a buffer or its input",
    (lambda layers, h: DividedByItsNorm.apply(h)): "it calls DividedByItsNorm, whose backward is its own",
    clipped: "it registers a hook, which would see the gradients of tiles",
    (lambda layers, h: h - h.mean(1, keepdim=True) if torch.is_grad_enabled() else h): "aten.mean.dim mixes tokens",
}


@pytest.mark.parametrize("function", LOOKED_AT)
def test_lengths_gradients_and_views_are_looked_at(function):
    x = torch.randn(B, T, WIDTH, dtype=F64)
    assert why_whole(Layers(with_inner(function)).double(), TILE, x, {}) == LOOKED_AT[function]
    assert_equal(pair(lambda: Layers(with_inner(function))))


class Optional(Layers):
    def forward(self, x, mixed=False):
        h = inner(self, x)
        return self.second(h.cumsum(1) if mixed else h)


def test_keywords_and_batch_sizes_are_looked_at():
    layers, x = Optional(None).double(), torch.randn(B, T, WIDTH, dtype=F64)
    assert why_whole(layers, TILE, x, {}) is None and why_whole(layers, TILE, x, {"mixed": True}) is not None
    layers = Layers(with_inner(lambda layers, h: h - h.reshape(h.shape[1], len(h), -1).mean(1, keepdim=True).mean()))
    for batch in (1, B, 1):
        assert (why_whole(layers.double(), TILE, x[:batch], {}) is None) <= (batch == 1)


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"])
def test_modules_with_hooks_are_taken_whole(hook):
    layers = Layers(with_inner(lambda layers, h: h)).double()
    getattr(layers.first, hook)(lambda *given: None)
    reason = why_whole(layers, TILE, torch.randn(B, T, WIDTH, dtype=F64), {}, trusted=True)
    assert reason == "it has hooks, which would see tiles"


def test_blocks_that_are_named_are_taken_whole_and_given_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Block(Layers(with_inner(lambda layers, h: h.cumsum(1)))), nn.Identity())).double()
    with pytest.warns(UserWarning, match="Block is taken whole, not in tiles"):
        step(recompute(model, "0", tile={"0.0": TILE}), 0)
    undo(model)
    assert not any({"forward", "_replicate_for_data_parallel"} & vars(part).keys() for part in model.modules())
