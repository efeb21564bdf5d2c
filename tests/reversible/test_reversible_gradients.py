"""Gradients of every schedule against plain autograd, in float64."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence

RECOMPUTING = ["checkpoint", "reversible"]
WIDTH = 8


class Branch(nn.Module):
    """A branch with dropout that can add a tensor and scale by a number given at the call."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, bias=None, scale=1.0, options=None):
        hidden = self.dropout(torch.tanh(self.inner(self.norm(x))))
        if bias is not None:
            hidden = hidden + bias
        if options is not None:
            hidden = hidden * options["gains"][0]
        return self.dropout(self.outer(hidden)) * scale


def sequence(depth: int, dropout: float = 0.0) -> ReversibleSequence:
    torch.manual_seed(depth)
    return ReversibleSequence([ReversibleBlock(Branch(dropout), Branch(dropout)) for _ in range(depth)]).double()


def relative_error(result, reference) -> float:
    """The largest difference over the largest magnitude, tensor by tensor; a gradient that only one side has is infinite."""
    assert len(result) == len(reference)
    if any((a is None) != (b is None) for a, b in zip(result, reference, strict=True)):
        return float("inf")
    pairs = [(a, b) for a, b in zip(result, reference, strict=True) if a is not None]
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in pairs)


def freeze_stem(net, stem):
    stem.requires_grad_(False)


def freeze_blocks(net, stem):
    for index in (0, 2):
        net.blocks[index].requires_grad_(False)


def freeze_all_but_one_bias(net, stem):
    freeze_stem(net, stem)
    net.requires_grad_(False)
    net.blocks[1].g.outer.bias.requires_grad_(True)


def share_blocks(net, stem):
    net.blocks[2] = net.blocks[0]
    net.blocks[3].g = net.blocks[3].f


def hook_parameters(net, stem):
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: 2 * grad)


@dataclass
class Case:
    depth: int = 4
    dropout: float = 0.0
    prepare: object = None
    f_kwargs: dict = field(default_factory=dict)
    g_kwargs: dict = field(default_factory=dict)
    calls: int = 1


def learned(*shape):
    return torch.linspace(-1, 1, shape[-1], dtype=torch.float64).expand(shape).clone().requires_grad_()


CASES = {
    **{f"depth {depth}": Case(depth=depth) for depth in [*range(1, 10), 24]},
    "dropout": Case(dropout=0.3),
    "dropout, two forwards before one backward": Case(dropout=0.3, calls=2),
    "frozen stem": Case(prepare=freeze_stem),
    "frozen blocks": Case(prepare=freeze_blocks),
    "one bias trained": Case(prepare=freeze_all_but_one_bias),
    "shared blocks": Case(prepare=share_blocks),
    "tensor hooks": Case(prepare=hook_parameters),
    "keyword tensors with gradient": Case(f_kwargs={"bias": learned(2 * WIDTH)}, g_kwargs={"bias": learned(3, 2 * WIDTH)}),
    "keyword numbers": Case(f_kwargs={"scale": 0.5}, g_kwargs={"scale": -2.0}),
    "nested keyword tensors": Case(g_kwargs={"options": {"gains": [learned(2 * WIDTH), 3]}}, dropout=0.1),
}


def gradients(case: Case, backward: str, by: str = "backward"):
    """Loss, gradients of all parameters, of the input and of the keyword tensors, and the random state afterwards."""
    net = sequence(case.depth, case.dropout)
    net.backward = backward
    stem = nn.Linear(WIDTH, WIDTH).double()
    if case.prepare:
        case.prepare(net, stem)
    keyword = [t for t in torch.utils._pytree.tree_leaves([case.f_kwargs, case.g_kwargs]) if isinstance(t, torch.Tensor)]
    leaves = [p for p in [*stem.parameters(), *net.parameters(), *keyword] if p.requires_grad]
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(7)
    loss = 0
    for call in range(case.calls):
        x1, x2 = stem(x + call), stem(x).tanh()
        y1, y2 = net(x1, x2, f_kwargs=case.f_kwargs, g_kwargs=case.g_kwargs)
        loss = loss + (y1 * y2.sin()).sum() * (call + 1)
    if by == "autograd.grad":
        grads = torch.autograd.grad(loss, leaves)
    else:
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        grads = [leaf.grad.clone() for leaf in leaves]
    return loss, grads, torch.get_rng_state()


@pytest.mark.parametrize("backward", RECOMPUTING)
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_random_state_equal_plain_autograd(name, backward):
    loss, grads, random_state = gradients(CASES[name], "autograd")
    recomputed_loss, recomputed, recomputed_state = gradients(CASES[name], backward)
    assert torch.equal(recomputed_loss, loss)
    assert relative_error(recomputed, grads) <= 1e-10
    assert torch.equal(recomputed_state, random_state)


@pytest.mark.parametrize("backward", RECOMPUTING)
def test_autograd_grad_gives_the_same(backward):
    _, grads, _ = gradients(Case(dropout=0.2), "autograd")
    _, by_grad, _ = gradients(Case(dropout=0.2), backward, by="autograd.grad")
    assert relative_error(by_grad, grads) <= 1e-10


def test_one_stream_alone_in_the_loss():
    reference, net = sequence(3), sequence(3)
    reference.backward = "autograd"
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    for which in (0, 1):
        ours, plain = (
            [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(
                    s.parameters(),
                    torch.autograd.grad(s(x, x)[which].sum(), s.parameters(), allow_unused=True),
                    strict=True,
                )
            ]
            for s in (net, reference)
        )
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(ours, plain, strict=True))


def test_backward_twice_through_a_retained_graph():
    net = sequence(5, dropout=0.2)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    y1, y2 = net(x, x)
    loss = (y1 * y2).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    again = torch.autograd.grad(loss, x)[0]
    assert torch.equal(first, again)


def test_differentiating_twice_is_refused():
    net = sequence(2)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    grad = torch.autograd.grad(sum(y.pow(2).sum() for y in net(x, x)), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_editing_a_keyword_tensor_before_the_backward_is_noticed():
    net = sequence(2)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(2 * WIDTH, dtype=torch.float64)
    loss = sum(y.sum() for y in net(x, x, f_kwargs={"bias": bias}))
    bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_accumulate_over_backwards():
    nets = [sequence(3, dropout=0.2) for _ in range(2)]
    nets[0].backward = "autograd"
    for net in nets:
        torch.manual_seed(1)
        for step in range(3):
            x = torch.full((2, 3, WIDTH), 0.1 * step, dtype=torch.float64).cumsum(-1)
            sum(y.sin().sum() for y in net(x, x)).backward()
    assert relative_error([p.grad for p in nets[1].parameters()], [p.grad for p in nets[0].parameters()]) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_restored_in_the_recomputation(dtype):
    """The recomputed branches must run in the autocast dtype of the forward: then all schedules agree to fp32 rounding."""
    results = {}
    for backward in ["autograd", *RECOMPUTING]:
        net = sequence(12, dropout=0.1).float()
        net.backward = backward
        x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=dtype):
            y1, y2 = net(x, x)
        assert y1.dtype == y2.dtype == torch.float32
        (y1 * y2).sum().backward()
        results[backward] = [p.grad for p in net.parameters()]
    flat = {name: torch.cat([g.flatten() for g in grads]) for name, grads in results.items()}
    for backward in RECOMPUTING:
        assert ((flat[backward] - flat["autograd"]).norm() / flat["autograd"].norm()).item() <= 1e-3


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_blocks_simply_run(context):
    net = sequence(4).eval()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    expected = x, x
    for block in net.blocks:
        expected = block(*expected)
    with context():
        y = net(x, x)
    assert all(torch.equal(a, b) for a, b in zip(y, expected, strict=True))


def test_inverse_rebuilds_the_input():
    net = sequence(24)
    x1, x2 = torch.randn(2, 2, 3, WIDTH, dtype=torch.float64)
    kwargs = {"f_kwargs": {"scale": 0.7}, "g_kwargs": {"bias": torch.ones(2 * WIDTH, dtype=torch.float64)}}
    with torch.no_grad():
        rebuilt = net.inverse(*net(x1, x2, **kwargs), **kwargs)
    assert relative_error(rebuilt, (x1, x2)) <= 1e-10


def test_what_is_stored_does_not_grow_with_depth():
    def stored_bytes(depth: int, backward: str) -> int:
        net = sequence(depth)
        net.backward = backward
        x = torch.randn(16, 8, WIDTH, dtype=torch.float64, requires_grad=True)
        parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            net(x, x)
        return sum(size for size, _ in storages.values())

    assert stored_bytes(24, "reversible") == stored_bytes(6, "reversible")
    assert stored_bytes(24, "autograd") > 3 * stored_bytes(6, "autograd")


def test_the_schedule_is_no_part_of_the_state():
    net = sequence(2)
    twin = copy.deepcopy(net)
    twin.backward = "autograd"
    assert list(net.state_dict()) == list(twin.state_dict())


class Narrowing(nn.Module):
    def forward(self, x):
        return x[..., :1]


class Doubling(nn.Module):
    def forward(self, x):
        return x.double()


@pytest.mark.parametrize("backward", ["autograd", *RECOMPUTING])
@pytest.mark.parametrize(
    ("f", "words"), [(Narrowing(), "preserve the shape"), (Doubling(), "dtype"), (nn.LSTM(4, 4), "tensor")]
)
def test_a_branch_that_changes_shape_or_dtype_is_refused(f, words, backward):
    net = ReversibleSequence([ReversibleBlock(f, nn.Identity())], backward)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match=words):
        net(x, x)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="autograd, checkpoint, reversible"):
        ReversibleSequence([], backward="revresible")
    net = sequence(1)
    with pytest.raises(ValueError, match="share shape"):
        net(torch.zeros(2, WIDTH), torch.zeros(3, WIDTH))
    with pytest.raises(ValueError, match="share shape"):
        net(torch.zeros(2, WIDTH, dtype=torch.long), torch.zeros(2, WIDTH, dtype=torch.long))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("backward", RECOMPUTING)
def test_cuda_gradients_and_random_state_equal_plain_autograd(backward):
    results = []
    for schedule in ("autograd", backward):
        net = sequence(6, dropout=0.3).cuda()
        net.backward = schedule
        x = torch.linspace(-1, 1, 6 * WIDTH, dtype=torch.float64, device="cuda").view(2, 3, WIDTH).requires_grad_()
        torch.cuda.manual_seed(5)
        (net(x, x)[0] * net(x, x)[1]).sum().backward()
        results.append(([x.grad, *(p.grad for p in net.parameters())], torch.cuda.get_rng_state()))
    assert relative_error(results[1][0], results[0][0]) <= 1e-10
    assert torch.equal(results[1][1], results[0][1])
