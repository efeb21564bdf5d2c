"""Blocks that torch.compile recomputes: gradients, what they keep, how often they are compiled, and what is refused."""

import shutil
import warnings

import pytest
import torch
from compared import assert_close, assert_equal
from small_stacks import BLOCKS, WIDTH, Block, Model, inputs, recomputed
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from holotrain.models import ViT
from holotrain.models.block_schedules import compile_blocks, has_compiled_blocks, set_backward
from holotrain.reversible import ReversibleBlock, ReversibleSequence, checkpointed, compiled, recompute, undo
from holotrain.reversible.in_place import RecomputedForward
from holotrain.schedules import kind_of


@pytest.fixture(params=["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.long)], autouse=True)
def calls(request, monkeypatch):
    """The compiled calls of each class. The first backend divides forward and backward as inductor does, without C++."""
    if request.param == "inductor" and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler")
    made, init = [], compiled.CompiledCall.__init__
    monkeypatch.setattr(compiled, "BACKEND", request.param)
    monkeypatch.setattr(compiled.CompiledCall, "__init__", lambda self, *a, **k: made.append(self) or init(self, *a, **k))
    torch.compiler.reset()
    compiled._call_of_kind.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*(without the compiler|was compiled)")
        yield made
    torch.compiler.reset()


def compilations(calls):
    return sum(call._compilations for call in calls)


def gradients(model, x, autocast=False):
    torch.manual_seed(0)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def without_dropout(block="pre-norm", depth=3):
    """In the mode of training; compiled code draws other numbers."""
    net = Model(BLOCKS[block], depth).double()
    for part in net.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return net


CASES = [(block, backward) for block in BLOCKS for backward in ("compiled", "compiled:0.3")]
QUICK = "a position bias", "compiled"


@pytest.mark.parametrize(
    ("block", "backward"), [QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case != QUICK)]
)
def test_gradients_are_those_of_autograd(block, backward, calls):
    """Masks, tuples and other streams pass through; blocks share their code; and it is taken back."""
    net, x = without_dropout(block), inputs()
    plain = gradients(net, x)
    assert_close(gradients(recomputed(net, backward), x), plain, rtol=1e-10, atol=1e-12)
    assert 1 <= compilations(calls) <= 2  # the first block may get no context
    assert_equal(gradients(undo(net), x), plain)
    assert not any(map(RecomputedForward.of, net.modules()))


def mlps(depth):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Tanh()).double() for _ in range(depth)]


def through(blocks, x, backward):
    for block in blocks:
        x = block(x) if backward == "autograd" else checkpointed(block, x, backward=backward)
    return x


def test_eight_bits_are_rounded_as_without_the_compiler():
    net, x = without_dropout(), inputs()
    plain, rounded = gradients(net, x), gradients(recomputed(net, "checkpoint8"), x)
    found = gradients(recomputed(net, "compiled8"), x)
    assert_close(found, rounded, rtol=1e-10, atol=1e-12)
    assert (found[1] - plain[1]).abs().max() > 1e-6


class Dropped(nn.Sequential):
    """Its gradient at ones is its output, if the backward drops what the forward dropped."""

    def __init__(self):
        super().__init__(nn.Dropout(0.5), nn.Linear(64, 64, bias=False), nn.Dropout(0.3))
        nn.init.eye_(self[1].weight)


@pytest.mark.parametrize("backward", ["compiled", "compiled8", "compiled:0", "compiled:0.02", "compiled:1"])
def test_dropout_is_the_same_in_the_backward(backward):
    x = torch.ones(16, 64, dtype=torch.float64, requires_grad=True)
    output = checkpointed(Dropped().double(), x, backward=backward)
    output.sum().backward()
    assert 0.5 < (output == 0).double().mean() < 0.8
    torch.testing.assert_close(x.grad, output.detach())


def test_a_block_keeps_its_input_alone():
    kept, blocks = {}, mlps(5)
    own = {p.data_ptr() for block in blocks for p in block.parameters()}
    for backward in ("compiled", "compiled:0.3", "autograd"):
        found = {}
        with saved_tensors_hooks(lambda t, found=found: found.setdefault(t.data_ptr(), t), lambda t: t):
            through(blocks, torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True), backward)
        kept[backward] = sum(t.numel() for pointer, t in found.items() if pointer not in own)
    assert kept["compiled"] == 5 * 3 * WIDTH < kept["compiled:0.3"] < kept["autograd"]


@pytest.mark.slow
def test_eight_bits_are_all_that_is_kept_of_an_input():
    """Its memory is free after the forward."""
    blocks, kept = mlps(3), {}
    for backward in ("compiled", "compiled8"):
        x, storages = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True).tanh(), []
        for block in blocks:
            storages.append(StorageWeakRef(x.untyped_storage()))
            x = checkpointed(block, x, backward=backward)
        kept[backward] = [not storage.expired() for storage in storages[1:]]
    assert kept == {"compiled": [True, True], "compiled8": [False, False]}


@pytest.mark.slow
def test_three_lengths_are_compiled_twice(calls):
    """Once for the first, once for all."""
    blocks = mlps(2)
    for length in (8, 12, 20, 17):
        x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
        grads = [
            torch.autograd.grad(through(blocks, x, backward).square().sum(), [x, *blocks[0].parameters()])
            for backward in ("compiled", "autograd")
        ]
        assert_close(*grads, rtol=1e-10, atol=1e-12)
    assert compilations(calls) == 2


@pytest.mark.slow
def test_modes_and_frozen_weights_may_change():
    net, plain, x = recomputed(without_dropout(), "compiled"), without_dropout(), inputs()
    for each in (net, plain):
        each.layers[0].requires_grad_(False)
    assert_close(gradients(net, x), gradients(plain, x), rtol=1e-10, atol=1e-12)
    for each in (net.eval(), plain.eval()):
        each.layers.requires_grad_(True)
    assert_close(gradients(net, x), gradients(plain, x), rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        assert_equal(net(x), plain(x))


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["inductor"], indirect=True)
def test_bf16_is_near_what_it_is_without_the_compiler():
    net, x = without_dropout().float(), inputs(torch.float32)
    plain, found = gradients(net, x, autocast=True), gradients(recomputed(net, "compiled"), x, autocast=True)
    for a, b in zip(found, plain, strict=True):
        assert (a - b).norm() <= 0.03 * b.norm() + 1e-6


@pytest.mark.slow
def test_branches_of_two_streams():
    def net(backward):
        torch.manual_seed(0)
        branches = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        return ReversibleSequence(map(ReversibleBlock, branches[::2], branches[1::2]), backward).double()

    x = torch.randn(3, WIDTH, dtype=torch.float64)
    grads = []
    for backward in ("autograd", "compiled"):
        found = net(backward)
        sum(found(x, x + 1)).square().sum().backward()
        grads.append([p.grad for p in found.parameters()])
    assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-12)


def test_compile_blocks_has_the_compiler_recompute(calls):
    """In our models and in those of others; what is stored stays stored, and what is taken in tiles stays so."""
    vit = ViT(image_size=8, patch_size=4, channels=1, classes=2, dim=WIDTH, depth=3, heads=2, backward="checkpoint").double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    plain = gradients(vit, x)
    compile_blocks(vit, backend=compiled.BACKEND)
    assert has_compiled_blocks(vit)
    assert_close(gradients(vit, x), plain, rtol=1e-10, atol=1e-12)
    assert compilations(calls) == 1
    other = without_dropout()
    recomputed(other, ["autograd", "checkpoint", "checkpoint8"])
    compile_blocks(other)
    assert [RecomputedForward.of(block).backward for block in other.layers] == ["compiled:1", "compiled", "compiled8"]
    tiled = recompute(without_dropout(), "layers", tile={"layers.*.inner": 2})
    compile_blocks(tiled)
    assert not has_compiled_blocks(tiled)


class Untraceable(Block):
    def forward(self, x, mask=None, context=None):
        torch._dynamo.graph_break()
        return super().forward(x, mask)


class Differing(Block):
    """Each is compiled anew."""

    number = 0

    def forward(self, x, mask=None, context=None):
        return super().forward(x, mask) * (self.number / 10)


def test_what_cannot_be_compiled_is_recomputed_without(calls):
    net, x = recomputed(Model(Untraceable, 2).double(), "compiled"), inputs()
    plain = gradients(undo(recomputed(Model(Untraceable, 2).double())), x)
    with pytest.warns(UserWarning, match="Untraceable is recomputed without the compiler") as said:
        assert_close(gradients(net, x), plain)
        assert_close(gradients(net, x), plain)
    assert sum("without the compiler" in str(each.message) for each in said) == 1


@pytest.mark.slow
def test_each_class_has_a_limit_of_its_own():
    """Torch's is 8 for each function."""
    x = torch.ones(2, 3, requires_grad=True)
    for number in range(9):
        checkpointed(type(f"Kind{number}", (nn.Tanh,), {})(), x, backward="compiled")


@pytest.mark.long
def test_many_compilations_are_said_once_and_end(calls):
    nets = [Model(Differing, 10).double().eval() for _ in range(2)]
    for net in nets:
        for number, block in enumerate(net.layers):
            block.number = 1 + number
    x = inputs()
    with pytest.warns(UserWarning, match="Differing was compiled 5 times") as said:
        assert_close(gradients(recomputed(nets[0], "compiled"), x), gradients(nets[1], x), rtol=1e-10, atol=1e-12)
    assert sum("Differing" in str(each.message) for each in said) == 1
    assert compilations(calls) == 8  # torch's limit; the other two run again without the compiler


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("compiled:1.5", "compiled:1$"),
        ("compiled:-1", "compiled:0$"),
        ("compiled8:much", "compiled8:0.3"),
        ("compiled:nan", "from 0 to 1"),
        ("offload:0.3", "not offload"),
        ("compild", "checkpoint, compiled, "),
    ],
)
def test_bad_names(name, message):
    net = without_dropout()
    with pytest.raises(ValueError, match=message):
        recompute(net, "layers", backward=name)
    with pytest.raises(ValueError, match=message):
        set_backward(ViT(image_size=8, patch_size=4, channels=1, classes=2, dim=8, depth=2, heads=2), name)
    assert kind_of("compiled:1e-2") == "compiled"


@pytest.mark.parametrize("option", [{"tile": 2}, {"heads": 1}, {"chunk": 2}], ids=str)
def test_parts_are_refused(option):
    with pytest.raises(ValueError, match='compiled:0.3 blocks take no tile, heads and chunk; use backward="checkpoint"'):
        recompute(without_dropout(), "layers", backward="compiled:0.3", **option)
