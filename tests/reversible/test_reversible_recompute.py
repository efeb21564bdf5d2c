"""Blocks of any model that run again in the backward, from what is kept of their inputs."""

import copy
import pickle
import warnings

import pytest
import small_stacks
import torch
from compared import assert_close, assert_equal
from covering import chosen, name_of, paired, pairwise
from happens_before import Race
from paper_gpu import Stream, paper_gpu
from small_stacks import BLOCKS, PLACES, TOKENS, USES, WIDTH, Model, recomputed
from torch import nn
from torch.nn import functional as F
from tracked_memory import TrackedMemory

from holotrain.reversible import ReversibleBlock, block_inputs, recompute, undo
from holotrain.reversible.block_inputs import rounded, unrounded
from holotrain.reversible.context import recomputing
from holotrain.reversible.in_place import RecomputedForward
from holotrain.reversible.sequence import AveragedStreams
from holotrain.reversible.side_stream import SameStream
from holotrain.schedules import EAGER, SCHEDULES


class Block(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, scale=1.0):
        return x + scale * self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, depth=4, width=128):
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, width), nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def stack():
    return Stack().double(), {"x": torch.randn(3, 5, 8, dtype=torch.float64)}


def gradients(model, inputs, seed=0):
    """Also the loss, first."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(**inputs).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def relative_error(found, true):
    pairs = list(zip(found[1:], true[1:], strict=True))
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


def test_gradients_are_those_of_autograd():
    """Inexact ones are near, and the loss is the same. One schedule follows the other, and in the end there is none."""
    model, inputs = stack()
    names, plain = list(model.state_dict()), gradients(model, inputs)
    for backward in EAGER:
        assert recompute(model, backward=backward) is model
        found = gradients(model, inputs)
        if SCHEDULES[backward].exact:
            assert_equal(found, plain)
        else:
            assert_equal(found[0], plain[0])
            assert 0 < relative_error(found, plain) < 0.02
    undo(model)
    assert not any(map(RecomputedForward.of, model.modules())) and list(model.state_dict()) == names
    assert all("forward" not in vars(part) for part in model.modules())
    assert_equal(gradients(model, inputs), plain)


def test_blocks_in_eval_run_again_too():
    model, inputs = stack()
    plain = gradients(model.eval(), inputs)
    runs = []
    model.blocks[0].up.register_forward_hook(lambda *given: runs.append(recomputing()))
    assert_equal(gradients(recompute(model), inputs), plain)
    assert runs == [False, True]


class Scaled(Block):
    def __init__(self):
        super().__init__(8)
        self.scales, self.name = {"default": 2.0}, "a"

    def forward(self, x):
        return super().forward(x, self.scales["default"])


def test_an_attribute_that_changes_before_the_backward_is_named():
    """In the steps 1, 2, 4, 8 ..."""
    model = recompute(nn.Sequential(nn.Sequential(Scaled(), Scaled())))
    said = []
    for number in range(1, 6):
        loss = model(torch.randn(2, 5, 8)).sum()
        model[0][1].scales["default"] = 0.1 * number
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss.backward()
        said.append([str(each.message) for each in caught])
        model[0][1].scales["default"] = 2.0
    assert [len(each) for each in said] == [1, 1, 0, 1, 0]
    assert "Scaled.scales was {'default': 2.0} before the forward and is {'default': 0.1} in the backward" in said[0][0]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_functions_are_refused(transform):
    model, inputs = stack()
    with pytest.raises(ValueError, match=r"cannot be transformed by torch\.func"):
        transform(lambda x: recompute(model)(x).sum())(inputs["x"])


def without_dropout(model):
    for part in model.modules():
        part.p = 0.0 if isinstance(part, nn.Dropout) else getattr(part, "p", None)
    return model


def test_the_gradients_of_8_bits_are_those_of_rounded_inputs():
    """An independent reference: a plain forward, then each block is differentiated by itself at its rounded input."""
    model, inputs = stack()
    found = gradients(recompute(without_dropout(model), backward="checkpoint8"), inputs)
    undo(model)

    class AtRounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run, x, *parameters):
            ctx.run, ctx.parameters = run, parameters
            ctx.save_for_backward(x)
            return run(x)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            groups = x.unflatten(-1, (-1, 64))
            steps = (groups.abs().amax(-1, keepdim=True) / 127).bfloat16().double()
            near = ((groups / steps).round().clamp(-127, 127) * steps).flatten(-2).requires_grad_()
            with torch.enable_grad():
                return (None, *torch.autograd.grad(ctx.run(near), (near, *ctx.parameters), gradient))

    for block in model.blocks:
        block.forward = lambda x, own=block.forward, block=block: AtRounded.apply(own, x, *block.parameters())
    assert_close(gradients(model, inputs), found, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    paired(
        [(3, 128), (2, 5, 64), (4, 7), (2, 3, 4, 100), (1, 65)], [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    ),
)
def test_rounding_is_within_half_a_step_and_what_it_keeps(shape, dtype):
    x = torch.randn(shape).mul(torch.logspace(-3, 3, shape[-1])).to(dtype)
    multiples, steps = rounded(x)
    near = unrounded(multiples, steps, torch.float64)[..., : shape[-1]]
    groups = -(-shape[-1] // 64)
    size = -(-shape[-1] // groups)
    rows = x.numel() // shape[-1]
    kept = sum(tensor.untyped_storage().nbytes() for tensor in (multiples, steps))
    assert kept == rows * groups * (size + 2)
    half = steps.double().expand_as(multiples).flatten(-2)[..., : shape[-1]] / 2
    assert ((near - x.double()).abs() <= half * 1.6).all()  # the step itself is rounded, by up to 127 / 256 of half a step
    assert_equal(unrounded(*rounded(torch.zeros(2, 64)), torch.float32), torch.zeros(2, 64))
    assert unrounded(*rounded(torch.tensor([[1.0, torch.inf]])), torch.float32).isnan().any()


def test_one_schedule_for_each_block_and_single_lists():
    model = nn.ModuleDict({"a": Stack(2).double(), "b": Stack(3).double()})
    recompute(model, ["a.blocks", "b.blocks[1:]"], backward=["checkpoint", "autograd", "offload", "checkpoint8"])
    found = [RecomputedForward.of(block) for name in "ab" for block in model[name].blocks]
    assert [forward and forward.backward for forward in found] == ["checkpoint", None, None, "offload", "checkpoint8"]


def test_reversible_blocks_have_the_same_schedules():
    """Two streams keep the inputs of both halves."""
    model = AveragedStreams([ReversibleBlock(Block(64), Block(64)) for _ in range(3)], "autograd").double()
    inputs = {"x": torch.randn(2, 6, 64, dtype=torch.float64)}
    true = gradients(model, inputs)
    for backward in EAGER:
        model.backward = backward
        error = relative_error(gradients(model, inputs), true)
        assert error == 0 if SCHEDULES[backward].exact else 0 < error < 0.05


MIXED = ["checkpoint", "checkpoint", "offload", "autograd", "checkpoint", "checkpoint"]
FACTORS = {
    "backward": ["checkpoint", "offload", MIXED],
    "around": PLACES,
    "block": [*BLOCKS],
    "use": [*USES],
    "dtype": [torch.float64, torch.float32, torch.bfloat16, "amp"],
}


CASES = chosen(pairwise(*FACTORS.values()), lambda number, case: number % 4 == 0)


@pytest.mark.parametrize(tuple(FACTORS), CASES, ids=name_of)
def test_gradients_are_those_of_autograd_whatever_a_model_does(backward, around, block, use, dtype):
    amp = dtype == "amp" and not around.startswith("casts")
    dtype = torch.float32 if dtype == "amp" else dtype
    found = small_stacks.gradients(recomputed(small_stacks.model(block, around, dtype), backward), use, amp=amp)
    assert_equal(found, small_stacks.gradients(small_stacks.model(block, around, dtype), use, amp=amp))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"])
def test_a_copy_has_blocks_of_its_own(copied):
    net = recomputed()
    twin = copied(net)
    assert [RecomputedForward.of(layer).module for layer in twin.layers] == list(twin.layers)
    assert_equal(small_stacks.gradients(twin), small_stacks.gradients(net))
    assert_equal(small_stacks.gradients(undo(twin)), small_stacks.gradients(undo(net)))


def test_adapters_and_frozen_weights():
    found = []
    for backward in ("autograd", "checkpoint"):
        net = small_stacks.model()
        net.requires_grad_(False)
        for layer in net.layers[1:]:
            layer.outer = nn.Sequential(layer.outer, nn.Linear(WIDTH, WIDTH).double())
        found.append(small_stacks.gradients(recomputed(net, backward)))
    assert len(found[0]) == 2 * 10
    assert_equal(*found)


@pytest.mark.parametrize("around", ["nothing", "freezes the first"])
def test_blocks_run_again_once(around):
    """Also where the first ones run without gradients."""
    net, calls = recomputed(small_stacks.model(around=around)), []
    net.layers[4].norm1.register_forward_hook(lambda *_: calls.append(recomputing()))
    small_stacks.gradients(net, steps=1)
    assert calls == [False, True]


def bytes_kept(net, x):
    net(x).sum().backward()
    with TrackedMemory(net) as memory:
        loss = net(x).sum()
        alive = memory.alive
        loss.backward()
        del loss
        assert memory.alive <= x.nbytes + 100  # nothing stays
    return alive


@pytest.mark.parametrize(("backward", "kept"), [("checkpoint", 4), ("checkpoint8", 1 + 2 / WIDTH)])
def test_a_block_keeps_its_input_and_nothing_else(backward, kept):
    """In bytes an element; in 8 bits also one step of 2 bytes for each token."""
    x = torch.randn(64, TOKENS, 4)
    nets = [recomputed(Model(lambda: small_stacks.Block(dropout=0.0), depth), backward) for depth in (12, 24)]
    alive = [bytes_kept(net, x) for net in nets]
    assert (alive[1] - alive[0]) / 12 / (64 * TOKENS * WIDTH) == pytest.approx(kept, rel=0.1)


class Tuples(small_stacks.Block):
    """Takes its stream by keyword, fills a cache, and returns more than tensors; alone, only a second tensor is used."""

    def forward(self, hidden, cache=None):
        if cache is not None:
            cache.update(hidden)
        return super().forward(hidden), {"seen": hidden.shape}, hidden.sin()


class Cache:
    def __init__(self):
        self.held = []

    def update(self, keys):
        self.held.append(keys)

    def get_seq_length(self):
        return sum(keys.shape[1] for keys in self.held)


class TupleModel(Model):
    cache, aside = None, False

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers[: 3 if self.aside else None]:
            x, others, aside = layer(hidden=x, cache=self.cache)
            assert others == {"seen": aside.shape}
        return self.head(aside if self.aside else x)


@pytest.mark.parametrize("aside", [False, True])
def test_tuples_streams_by_name_and_caches(aside):
    """A cache is filled where nothing runs again."""
    plain, net = (recomputed(TupleModel(Tuples, 4).double(), backward) for backward in ("autograd", "checkpoint"))
    plain.aside = net.aside = aside
    net.cache, x = Cache(), small_stacks.inputs()
    assert_equal(small_stacks.gradients(net), small_stacks.gradients(plain))
    assert not net.cache.held
    plain.cache = Cache()
    plain(x).sum().backward()
    assert len(plain.cache.held) == (3 if aside else 4)
    net.cache.update(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="past keys and values in training"):
        net(x)
    with torch.no_grad():
        net(x)
    net.eval()(x)
    assert len(net.cache.held) == (7 if aside else 9)


def test_a_static_cache_is_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 50}
    net = recompute(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))).train()
    with pytest.raises(ValueError, match="a block got a StaticCache in training, .* use_cache=False"):
        net(torch.arange(24).view(2, 12), past_key_values=transformers.StaticCache(config=net.config, max_cache_len=16))


def test_a_compiled_model(compiler):
    model, inputs = stack()
    without_dropout(model)
    true = gradients(model, inputs)
    found = gradients(torch.compile(recompute(model, backward="checkpoint")), inputs)
    assert_close(found, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("late", [False, True])
def test_offloading_on_a_gpu_on_paper(monkeypatch, late):
    """Two streams, no race, the same gradients; inputs are gone from the device after the forward."""
    model, inputs = stack()
    without_dropout(model)
    true = gradients(model, inputs)
    with paper_gpu(monkeypatch, late) as machine:
        model.to("cuda")
        recompute(model, backward="offload")
        made = []
        monkeypatch.setattr(block_inputs, "OffloadedInput", lambda *given: made.append(kind(*given)) or made[-1])
        found = gradients(model, {"x": inputs["x"].to("cuda")})
        assert machine.waits == []  # the host has waited for nothing
        found = [gradient.cpu() for gradient in found]
        assert [kept._host.device.type for kept in made] == ["cpu"] * 4
    assert_close(found, true, rtol=1e-12, atol=1e-14)


kind = block_inputs.OffloadedInput


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("wait_stream", r"side stream \d (reads|still|overwrites)"),
        ("wait_event", r"the default stream (reads|overwrites) what side stream|side stream \d still"),
    ],
)
def test_a_wait_that_is_left_out_is_found(monkeypatch, method, words):
    model, inputs = stack()
    with paper_gpu(monkeypatch), pytest.raises(Race, match=words):
        monkeypatch.setattr(Stream, method, lambda *_: None)
        gradients(recompute(model.to("cuda"), backward="offload"), {"x": inputs["x"].to("cuda")})


def test_where_memory_cannot_be_pinned_the_input_stays(monkeypatch):
    model, inputs = stack()
    true, asked = gradients(model, inputs), []

    def refuse(*given):
        asked.append(given)
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(block_inputs, "side_of", lambda x: SameStream())
    monkeypatch.setattr(block_inputs, "OffloadedInput", refuse)
    with pytest.warns(UserWarning, match="offload keeps inputs on the device: out of pinned memory"):
        assert_equal(gradients(recompute(model, backward="offload"), inputs), true)
    assert len(asked) == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnAGpu:
    @pytest.fixture
    def model(self):
        return Stack(8, 256).cuda(), {"x": torch.randn(64, 32, 8, device="cuda")}

    def test_offloaded_inputs_leave_the_device(self, model):
        model, inputs = model
        true = gradients(model, inputs)
        kept = {}
        for backward in ("checkpoint", "offload"):
            recompute(model, backward=backward)
            assert_equal(gradients(model, inputs), true)
            before = torch.cuda.memory_allocated()
            loss = model(**inputs).square().mean()
            torch.cuda.synchronize()
            kept[backward] = torch.cuda.memory_allocated() - before
            loss.backward()
        stream = 64 * 32 * 256 * 4
        assert kept["checkpoint"] - kept["offload"] >= 7 * stream

    def test_copies_are_on_a_second_stream(self, model):
        model, inputs = model
        recompute(model, backward="offload")
        gradients(model, inputs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            gradients(model, inputs)
            torch.cuda.synchronize()
        events = profile.events()
        copies = {event.device_resource_id for event in events if "Memcpy" in event.name and "inned" in event.name}
        others = {event.device_resource_id for event in events if "gemm" in event.name.lower()}
        assert copies and others and not copies & others

    @pytest.mark.parametrize("backward", EAGER)
    def test_bf16_autocast_repeats(self, model, backward):
        model, inputs = model
        with torch.autocast("cuda", torch.bfloat16):
            true = gradients(model, inputs)
            found = gradients(recompute(model, backward=backward), inputs)
        assert relative_error(found, true) <= (0 if SCHEDULES[backward].exact else 0.02)
