"""Every path that uses CUDA streams, on a GPU on paper: nobody reads, writes or frees what another may still use.

See paper_gpu.py for what that shows and what it cannot. The results are compared with the same code on the host. The host waits
for no result, and makes no tensor during a step of a model.
"""

import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from compared import assert_close
from covering import name_of, slow
from engine_branches import WIDTH
from engine_cases import MIXED, sequence
from happens_before import Race
from paper_gpu import Event, Stream, paper_gpu
from small_models import FAMILIES, TRANSFORMERS, example
from torch import Tensor, nn

import holotrain.models
from holotrain.clock import Clock
from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.optimizers import InBackward
from holotrain.overlap import all_to_all_linear, column_parallel_linear, linear_all_to_all, row_parallel_linear, signals
from holotrain.overlap import groups as in_groups
from holotrain.overlap.groups import Collectives, Columns, Holding
from holotrain.reversible import ReversibleBlock, ReversibleSequence, recompute
from holotrain.reversible.graphs import WARM_UPS, StepGraphs
from holotrain.synthesis import HolographicSynthesis
from holotrain.tasks import optimizer_functions


@pytest.fixture
def on_paper(monkeypatch):
    with paper_gpu(monkeypatch) as machine:
        yield machine


def gradients(net, x):
    y1, y2 = net(x, x.tanh())
    return torch.autograd.grad((y1 * y2.sin()).sum(), [x, *net.parameters()])


ENGINES = ["checkpoint", "reversible", "pareprop", "pareprop+matmul", MIXED]


def engine(depth, backward, device, exact=False):
    """Gradients of a sequence, twice, as the second backward meets memory of the first."""
    net = sequence(depth)
    net.backward = [*backward[:depth]] if isinstance(backward, tuple) else [backward] * depth
    if exact:
        net.exact = 30
    x = torch.linspace(-1, 1, 6 * WIDTH, dtype=torch.float64).view(2, 3, WIDTH)
    net, x = net.to(device), x.to(device).requires_grad_()
    gradients(net, x)
    return [grad.cpu() for grad in gradients(net, x)]


@pytest.mark.parametrize("backward", ENGINES, ids=str)
def test_the_engine(on_paper, backward):
    for depth in (1, 5):
        on_paper.waits.clear()
        found = engine(depth, backward, "cuda")
        assert on_paper.waits == ["aten._to_copy"] * len(found)  # of the gradients that are compared
        assert_close(found, engine(depth, backward, "cpu"))
    assert on_paper.events_waited_for == 0
    assert any("side" in stream for _, stream in on_paper.log) == (
        isinstance(backward, tuple) or backward.startswith("pareprop")
    )


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, x):
        return self.scale * x.sin()


@pytest.mark.parametrize("backward", ["reversible", "pareprop"])
def test_what_is_rebuilt_wrongly_is_said_when_the_next_step_begins(on_paper, backward):
    net = ReversibleSequence([ReversibleBlock(Scaled(), Scaled()) for _ in range(3)], backward)
    x = torch.linspace(-1, 1, 6, device="cuda").requires_grad_()
    total = sum(net(x, x.tanh())).sum()
    for block in net.blocks:
        block.f.scale = block.g.scale = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total.backward()
    with pytest.warns(UserWarning, match="From the next step on the blocks keep their inputs"):
        net(x, x)
    assert net.checks.failed


def test_a_capture_does_not_ask_what_has_arrived(on_paper):
    net = sequence(2).to("cuda")
    net.backward = "reversible"
    step = StepGraphs(lambda x: sum(net(x, x.tanh())).mean(), net)
    for _ in range(WARM_UPS + 2):  # and no other forward between them
        step(torch.ones(3, WIDTH, dtype=torch.float64, device="cuda"))
    assert net.checks.errors[0].item() < 1e-12


class Flipping(nn.Module):
    """Adds 1 in every second call, where its input is large."""

    def __init__(self):
        super().__init__()
        self.sign = torch.ones((), device="cuda")

    def forward(self, x):
        self.sign.neg_()
        return x.sin() + self.sign * (x.abs().amax() > 5)


def test_what_a_replay_rebuilds_wrongly_is_said_and_drops_the_graph(on_paper):
    net = ReversibleSequence([ReversibleBlock(Flipping(), Flipping()) for _ in range(3)], "reversible")
    step = StepGraphs(lambda x: sum(net(x, x.tanh())).mean(), net)
    x = torch.full((2, 3), 0.5, device="cuda").requires_grad_()
    for _ in range(WARM_UPS + 2):
        step(x)
    step(20 * x)
    assert step.captured == 1
    with pytest.warns(UserWarning, match="From the next step on the blocks keep their inputs"):
        step(x)
    assert not step._graphs
    for _ in range(WARM_UPS + 2):
        step(20 * x)
    assert net.checks.failed and step.captured == 1


def test_a_step_that_draws_on_the_host_stays_an_ordinary_one(on_paper):
    weight, drawn = nn.Parameter(torch.ones(3, device="cuda")), []

    def loss(x):
        drawn.append(float(torch.rand(())))
        return (weight * x).sum() * drawn[-1]

    step = StepGraphs(loss, nn.ParameterList([weight]))
    x = torch.ones(3, device="cuda")
    with pytest.warns(UserWarning, match="draws random numbers on the CPU"):
        step(x)
    for number in range(WARM_UPS + 3):
        assert step(x).item() == pytest.approx(3 * drawn[-1])
        assert len(drawn) == number + 2


def test_the_backward_of_a_captured_step_runs_outside_of_autocast(on_paper):
    modes = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            modes.append(torch.is_autocast_enabled("cuda"))
            return gradient * 2

    weight = nn.Parameter(torch.ones(3, device="cuda"))
    step = StepGraphs(lambda x: Noting.apply(weight * x).sum(), nn.ParameterList([weight]))
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(WARM_UPS + 1):
            step(torch.ones(3, device="cuda"))
    assert modes == [False] * (WARM_UPS + 1)


def test_offload_in_a_capture_says_that_inputs_stay(on_paper):
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))).to("cuda")
    model = recompute(nn.ModuleList([blocks]), backward="offload")[0]
    step = StepGraphs(lambda x: model(x).sum(), model)
    with pytest.warns(UserWarning, match="offload keeps inputs on the device in a CUDA graph"):
        for _ in range(WARM_UPS + 1):
            step(torch.ones(3, 4, device="cuda"))


@pytest.mark.parametrize("backward", ["autograd", *ENGINES[:3]])
def test_a_captured_step(on_paper, backward):
    net = sequence(2)
    net.backward = backward
    net.to("cuda")

    def loss(x):
        y1, y2 = net(x, x.tanh())
        return (y1 * y2.sin()).mean()

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = StepGraphs(loss, net)
    for number in range(WARM_UPS + 3):
        x = torch.linspace(-1, number, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH).to("cuda")
        value = step(x)
        due = torch.autograd.grad(loss(x), list(net.parameters()))
        assert_close(value, loss(x))
        assert_close([p.grad for p in net.parameters()], due)
        del due
        optimizer.step()
        optimizer.zero_grad()
    step(x[:2]).item()
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(("RevViT", optimizer_functions.adamw), ("RevRoBERTa", optimizer_functions.muon), ("GPT", optimizer_functions.sgd)),
        *(slow(name, optimizer_functions.adamw) for name in TRANSFORMERS),
    ],
    ids=name_of,
)
def test_models_that_are_stepped_in_the_backward(on_paper, name, optimizer):
    def trained(device):
        torch.manual_seed(0)
        backward = "pareprop" if name.startswith("Rev") else "checkpoint"
        model = getattr(holotrain.models, name)(**FAMILIES[name.removeprefix("Rev")], backward=backward).eval().to(device)
        stepped = optimizer(model)
        if isinstance(stepped, torch.optim.AdamW):  # steps of gradients that are rounding errors show how a kernel rounds
            stepped.param_groups[:] = [group | {"fused": True} for group in stepped.param_groups]
        x, stepping = example(name).to(device), InBackward(stepped)
        for _ in range(2):
            on_paper.waits.clear()
            on_paper.made_on_host.clear()
            model(x).square().mean().backward()
            stepping.step()
        assert device == "cpu" or not on_paper.waits + on_paper.made_on_host
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert_close(trained("cuda"), trained("cpu"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", ["kaneko", "article", "backpropagation"])
def test_error_diffusion(on_paper, rule):
    def trained(device):
        torch.manual_seed(0)
        net = ErrorDiffusionNetwork(inputs=64, outputs=5, width=4, depth=3, rule=rule).to(device)
        x = torch.linspace(-1, 1, 3 * 64).view(3, 64).to(device)
        on_paper.made_on_host.clear()
        net(x).square().sum().backward()
        net.clamp_signs()
        assert device == "cpu" or not on_paper.waits + on_paper.made_on_host
        return [tensor.detach().cpu() for parameter in net.parameters() for tensor in (parameter, parameter.grad)]

    assert_close(trained("cuda"), trained("cpu"))


def synthesised(device, steps=4, **options):
    """A model after some steps, and the figures of the last. Gradients are in memory that is used again, as DDP's are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 5)).double().to(device)
    synthesis = HolographicSynthesis(model, block_length=64, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    buckets = [torch.empty_like(parameter) for parameter in model.parameters()]
    for number in range(steps):
        x = torch.linspace(-1, number, 18, dtype=torch.float64).view(3, 6).to(device)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        for parameter, bucket in zip(model.parameters(), buckets, strict=True):
            parameter.grad = bucket.copy_(parameter.grad)
        synthesis.measuring = number == steps - 1
        assert synthesis.step()
        optimizer.step()
    return [synthesis.measured.cpu(), *(parameter.detach().cpu() for parameter in model.parameters())]


def test_a_clock_does_not_make_the_host_wait(on_paper):
    clock = Clock(torch.device("cuda"))
    marks = clock.mark(), clock.mark()
    assert clock.seconds(*marks) == 0.0 and on_paper.events_waited_for == 0
    assert clock.waited_seconds(*marks) == 0.0 and on_paper.events_waited_for == 1


SYNTHESES = [
    {"mode": "associative"},
    {"mode": "associative", "cuda_graph": True},
    {"mode": "shared", "match_norm": True, "cosine_floor": 0.1},
    {"mode": "bind", "mix": 0.5, "dtype": "fp16"},
]


@pytest.mark.parametrize("options", SYNTHESES, ids=str)
def test_synthesis(on_paper, options):
    on_host = {name: value for name, value in options.items() if name != "cuda_graph"}
    found = synthesised("cuda", **options)
    assert on_paper.waits == ["aten._to_copy"] * len(found)  # of what is compared
    assert on_paper.replays == (4 if "cuda_graph" in options else 0)
    assert_close(found, synthesised("cpu", **on_host))


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("options", [SYNTHESES[0], SYNTHESES[3]], ids=str)
def test_synthesis_split_between_the_device_and_the_host(monkeypatch, options, late):
    with paper_gpu(monkeypatch, late) as machine:
        on_device = synthesised("cuda", split="cpu", **options)
        assert machine.waits == ["aten._to_copy"] * (1 + len(on_device))  # when it is made, and of what is compared
        assert any("copy" in what and "side" in stream for what, stream in machine.log)
        assert_close(on_device, synthesised("cpu", split="cpu", **options))


class Nccl:
    """Stands for ``torch.distributed`` with two ranks, of which this is the first and the other has what this one has.

    Collectives run one after the other on a stream of their own, which waits for the stream that launched them. They hold no
    tensors, so that whoever launches them must.
    """

    ReduceOp, ProcessGroup = dist.ReduceOp, dist.ProcessGroup

    def __init__(self, device):
        self._stream = torch.cuda.Stream(priority=-1) if device == "cuda" else None
        self.reduced = []  # addresses, and whether they are in one piece

    def get_world_size(self, group):
        return 2

    def get_rank(self, group):
        return 0

    def get_backend(self, group):
        return "nccl"

    def _launched(self, work):
        if self._stream is None:
            work()
            return SimpleNamespace(wait=lambda: None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        done = self._stream.record_event()
        return SimpleNamespace(wait=lambda: torch.cuda.current_stream().wait_event(done))

    def all_reduce(self, tensor, group, async_op):
        self.reduced.append((tensor.data_ptr(), tensor.is_contiguous()))
        return self._launched(lambda: tensor.mul_(2))

    def reduce_scatter_tensor(self, share, parts, group, async_op):
        self.reduced.append((parts.data_ptr(), parts.is_contiguous()))
        return self._launched(lambda: share.copy_(parts[: len(share)]).mul_(2))

    def all_gather_into_tensor(self, parts, share, group, async_op):
        return self._launched(lambda: parts.unflatten(0, (2, -1)).copy_(share))

    def all_gather(self, parts, share, group, async_op):
        return self._launched(lambda: [part.copy_(share) for part in parts])

    def all_to_all(self, received, sent, group, async_op):
        return self._launched(lambda: [to.copy_(sent[0][: len(to)]) for to in received])


class SignallingProduct:
    """Stands for the kernel and for the driver's wait: it counts the tiles of each group, and notes what was done by then."""

    def __init__(self, machine, monkeypatch):
        self._machine, self.counted, self.results = machine, {}, []
        monkeypatch.setitem(sys.modules, "holotrain.overlap.kernel", self)
        for side in ("TILE_ROWS", "TILE_COLUMNS"):  # several tiles of each group
            monkeypatch.setattr(signals, side, 4)
        monkeypatch.setattr(signals, "supported", lambda x: x.is_cuda)
        monkeypatch.setattr(signals, "_wait_for_count", lambda: self.wait_value)

    def launch(self, x, matrix, bias, out, tiles, counts, programs):
        assert programs == torch.cuda.get_device_properties(x.device).multi_processor_count - 2  # for the collective
        self.results.append(range(out.data_ptr(), out.data_ptr() + out.nbytes))
        for read, written, height, column, group in self._machine.read_by_a_kernel(tiles):
            columns = slice(column, column + signals.TILE_COLUMNS)
            here = x[read : read + height] @ matrix[:, columns]
            out[written : written + height, columns] = here if bias is None else here + bias[columns]
            self._count(counts, group)

    def _count(self, counts, group):
        self.counted.setdefault(counts.data_ptr() + 4 * group, []).append(dict(self._machine.current.clock))
        self._zeros = counts

    def wait_value(self, handle, address, due, how):
        stream = next(stream for stream in self._machine.streams if stream.cuda_stream == handle)
        with torch.cuda.stream(stream):
            self._machine.read_by_a_kernel(self._zeros)  # counts of another product would be misunderstood
        stream.learn(self.counted[address][due - 1])
        return 0


LAYERS = {
    "row": partial(row_parallel_linear),
    "row, sequence": partial(row_parallel_linear, sequence_dim=0),
    "column": partial(column_parallel_linear),
    "column, sequence": partial(column_parallel_linear, sequence_dim=0),
    "to all": partial(linear_all_to_all),
    "to all, uneven": partial(linear_all_to_all, input_split_sizes=[12, 10], output_split_sizes=[12, 10]),
    "to all, features": partial(linear_all_to_all, sequence_dim=0),
    "from all": partial(all_to_all_linear),
    "from all, features": partial(all_to_all_linear, sequence_dim=0),
}


def overlapped(monkeypatch, device, layer, groups, signalling):
    with monkeypatch.context() as patch:
        patch.setattr(in_groups, "dist", nccl := Nccl(device))
        group = Collectives(None)
        inputs = 12 if layer == "from all, features" else 6
        x = torch.linspace(-1, 1, 22 * 6, dtype=torch.float64).view(22, 6).to(device).requires_grad_()
        weight = torch.linspace(-1, 1, 10 * inputs, dtype=torch.float64).view(10, inputs).sin().to(device).requires_grad_()
        bias = torch.linspace(1, 2, 10, dtype=torch.float64).to(device).requires_grad_()
        made = []
        for _ in range(2):  # the second meets memory of the first
            y = LAYERS[layer](x, weight, bias, group=group, groups=groups, signals=signalling)
            made = [y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))]
        return [tensor.detach().cpu() for tensor in made], nccl.reduced


@pytest.mark.parametrize("signalling", [False, True], ids=["products", "signals"])
@pytest.mark.parametrize("groups", [3, Columns(3)], ids=["rows", "columns"])
@pytest.mark.parametrize("layer", LAYERS)
def test_overlap(on_paper, monkeypatch, layer, groups, signalling):
    kernel = SignallingProduct(on_paper, monkeypatch)
    made, reduced = overlapped(monkeypatch, "cuda", layer, groups, signalling)
    assert_close(made, overlapped(monkeypatch, "cpu", layer, groups, False)[0])
    assert any("side" in stream for _, stream in on_paper.log)
    shares_of_columns = isinstance(groups, Columns) and layer in ("row, sequence", "column, sequence")
    assert bool(kernel.counted) == (signalling and not shares_of_columns)
    if kernel.counted:  # what is summed lies in one piece where the kernel has written it
        assert all(whole and any(at in result for result in kernel.results) for at, whole in reduced)


def nothing(*args):
    pass


def an_overlapped_layer(machine, monkeypatch, layer, signalling):
    SignallingProduct(machine, monkeypatch)
    overlapped(monkeypatch, "cuda", layer, 3, signalling)


def the_engine(machine, monkeypatch):
    engine(3, "pareprop", "cuda")


def a_synthesis(machine, monkeypatch, **options):
    synthesised("cuda", mode="associative", **options)


def not_holding(work, held, then=None):
    return Holding(work, None, then)


a_split_synthesis = partial(a_synthesis, split="cpu")
a_signalling_layer = partial(an_overlapped_layer, layer="row", signalling=True)
a_layer_that_scatters = partial(an_overlapped_layer, layer="row, sequence", signalling=False)

WITHOUT = {name: (Stream, name, nothing) for name in ("wait_stream", "wait_event")}
WITHOUT |= {"synchronize": (Event, "synchronize", nothing), "record_stream": (Tensor, "record_stream", nothing)}

MISTAKES = {
    "the side stream begins at once": (the_engine, ["wait_stream"], r"side stream \d reads what the default stream"),
    "gradients do not wait": (the_engine, ["wait_event"], r"the default stream reads what side stream"),
    "a flag is read too early": (a_synthesis, ["synchronize"], r"the host reads what the default stream"),
    "gradients are let go of": (a_split_synthesis, ["record_stream", "wait_event"], r"side stream \d still uses"),
    "what is sent is let go of": (a_layer_that_scatters, [(signals, "Holding", not_holding)], r"side stream \d still uses"),
    "old counts look like signals": (a_signalling_layer, ["wait_stream"], r"a kernel on side stream \d reads what the default"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_would_be_found(on_paper, monkeypatch, mistake):
    run, forgotten, complaint = MISTAKES[mistake]
    run(on_paper, monkeypatch)
    for each in forgotten:
        monkeypatch.setattr(*WITHOUT.get(each, each) if isinstance(each, str) else each)
    with pytest.raises(Race, match=complaint):
        run(on_paper, monkeypatch)
