"""Several devices on paper: examples by hand, and what must hold at every end."""

from itertools import product
from math import inf

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from tracked_memory import TrackedMemory

from holotrain.optimizers.shards import local
from holotrain.overlap import LINKS, Job
from holotrain.overlap.groups import ALL_REDUCE
from holotrain.overlap.links import Link
from holotrain.planning import TrainingStep, fake_tensors
from holotrain.planning.scaling import (
    Setting,
    TensorParallelWork,
    Times,
    Unit,
    Unsharded,
    buckets,
    ddp_bytes,
    ddp_seconds,
    fsdp_bytes,
    fsdp_seconds,
    predicted,
    settings_of,
    tp_seconds,
)
from holotrain.planning.tracker import Footprint
from holotrain.planning.training_step import simulate_update
from holotrain.reversible import ReversibleBlock
from holotrain.tasks.optimizer_functions import adafactor, muon

MIB = 2**20
NOTHING_TO_WAIT_FOR = Setting(Link(inf, 0.0))
KINDS = ("parameters", "buffers", "gradients", "optimizer", "average", "hologram", "batch", "activations", "temporary")
TIMES = Times(1.0, 4.0, 0.5)
HEAD = Unit(0, (), 0.0, block=False)


def block(size, work):
    return Unit(size, (size,), work, block=True)


def model(depth=6):
    """Blocks of four matrices, an embedding before them and a head behind."""
    embedding, head = Unit(8 * MIB, (8 * MIB,), 0.0, False), Unit(3 * MIB, (MIB, 2 * MIB), 0.1, False)
    return [embedding, *(Unit(12 * MIB, (3 * MIB,) * 4, 0.9 / depth, True) for _ in range(depth)), head]


def job(rows, inputs, outputs, ranks, covered=False):
    return Job(rows, inputs, outputs, ALL_REDUCE, ranks, torch.float32, torch.device("cpu"), covered)


def divided(ranks, depth=6, rows=4096, dim=512):
    """Attention and MLP of ``depth`` blocks, shared out evenly; nothing else is computed."""
    narrow, wide = job(rows, dim // ranks, dim, ranks), job(rows, 4 * dim // ranks, dim, ranks)
    stacked, widened = (job(rows, features * dim // ranks, dim, ranks, covered=True) for features in (3, 4))
    flops = 6 * 12 * dim * dim * rows * depth
    sums = {narrow: depth, wide: depth}
    return TensorParallelWork(1 / ranks, 1 / ranks, sums, {stacked: depth, widened: depth}, flops, 0)


WAYS = {
    "DDP": lambda times, ranks, setting: ddp_seconds(times, model(), ranks, setting),
    "FSDP2": lambda times, ranks, setting: fsdp_seconds(times, model(), ranks, setting),
    "TP": lambda times, ranks, setting: tp_seconds(times, divided(ranks), ranks, setting),
    "TP, overlapped": lambda times, ranks, setting: tp_seconds(times, divided(ranks), ranks, setting, overlapped=True),
}


def test_ddp_by_hand():
    # Each block's 25 MiB take 3 s on the link; the second's are there after 2 s of the backward, the first's after 4.
    units = [block(25 * MIB, 0.5), block(25 * MIB, 0.5), HEAD]
    setting = Setting(Link(25 * MIB / 3, 0.0))
    assert ddp_seconds(TIMES, units, 2, setting) == pytest.approx(1 + (2 + 3 + 3) + 0.5)
    # Slower beside a collective: there after 3 s and 6, and the link is then waiting.
    assert ddp_seconds(TIMES, units, 2, Setting(setting.link, slowdown=1.5)) == pytest.approx(1 + (3 + 3 + 3) + 0.5)
    # Gradients that add up travel with the last batch alone.
    assert ddp_seconds(Times(1.0, 4.0, 0.5, batches=3), units, 2, setting) == pytest.approx(2 * 5 + 9.5)


def test_buckets_are_filled_from_the_last_gradient_on():
    units = [block(2 * MIB, 0.25), Unit(40 * MIB, (30 * MIB, 10 * MIB), 0.5, True), Unit(MIB, (MIB,), 0.25, False)]
    assert buckets(units) == ([0.25, 0.5, 0.25], [MIB, 40 * MIB, 2 * MIB], 0.0)
    assert buckets([Unit(MIB, (), 0.75, True), Unit(MIB, (MIB,), 0.25, True)]) == ([0.25], [MIB], 0.75)


def test_fsdp_by_hand():
    # A block is gathered in 1 s, reduced in 1 s; it is computed in 2 s, and differentiated in 3.
    setting = Setting(Link(MIB, 0.0))
    units = [block(2 * MIB, 0.5), block(2 * MIB, 0.5), HEAD]
    forward, backward = 1 + 2 + 2, 1 + 3 + 3 + 1
    assert fsdp_seconds(Times(4.0, 6.0, 0.5), units, 2, setting) == pytest.approx(forward + backward + 0.5)
    # Four times as slow a link is what all wait for: 2 gathers; then the first gather, the second, two reductions.
    slow = Setting(Link(MIB / 4, 0.0))
    assert fsdp_seconds(Times(4.0, 6.0, 0.0), units, 2, slow) == pytest.approx((4 + 4 + 2) + (4 + 4 + 4 + 4))


def test_fsdp_gathers_what_is_in_no_block_first():
    setting = Setting(Link(MIB, 0.0))
    units = [Unit(6 * MIB, (), 0.0, False), block(2 * MIB, 1.0), HEAD]
    frozen = [Unit(6 * MIB, (), 0.0, False), Unit(2 * MIB, (), 1.0, True), HEAD]
    assert fsdp_seconds(Times(4.0, 6.0, 0.0), frozen, 2, setting) == pytest.approx((3 + 1 + 4) + (1 + 6))
    assert fsdp_seconds(Times(4.0, 6.0, 0.0), units, 2, setting) == pytest.approx((3 + 1 + 4) + (1 + 6 + 1))


def test_tensor_parallel_by_hand():
    # 4 MiB summed in 2 s, twice; half of the forward and of the backward is left, 10% of the rest is not saved.
    one = job(1024, 512, 1024, 2)
    found = TensorParallelWork(0.5, 0.5, {one: 1}, {one: 1}, 1e9, 0)
    link = Link(2 * MIB, 0.0)
    assert tp_seconds(TIMES, found, 2, Setting(link)) == pytest.approx(2.5 + 2 * 2 + 0.5)
    assert tp_seconds(TIMES, found, 2, Setting(link, undivided=0.1)) == pytest.approx(2.75 + 4 + 0.5)
    # The product takes 2 * 1024 * 512 * 1024 / (1e9 / 5) s, 5.4 of them; of ten groups only the last one's sum is seen.
    product = 2 * 1024 * 512 * 1024 / (1e9 / 5)
    best = product + 2 * (1024 - 9 * 103) / 1024
    overlapped = tp_seconds(TIMES, found, 2, Setting(link), overlapped=True)
    assert overlapped == pytest.approx(2.5 + 4 + 0.5 - 2 * (product + 2 - best), rel=0.005)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_link_without_limits_leaves_nothing_to_wait_for(name, devices):
    times = Times(1.0, 4.0, 0.0)
    shared = name.startswith("TP")
    found = predicted(
        name, 0, devices, (times, times), (NOTHING_TO_WAIT_FOR,) * 2, lambda t, s: WAYS[name](t, devices, s), 32, shared
    )
    assert (found.efficiency.low, found.efficiency.high) == pytest.approx((1, 1))
    assert found.throughput.low == pytest.approx(devices * 32 / times.step)


@pytest.mark.parametrize("name", WAYS)
def test_a_faster_link_is_never_slower(name):
    speeds = [Setting(Link(bandwidth, latency)) for latency in (1e-3, 1e-5, 0.0) for bandwidth in (1e6, 1e8, 1e10, 1e12)]
    for times in (TIMES, Times(0.01, 0.02, 0.001)):
        found = [(setting.link, WAYS[name](times, 4, setting)) for setting in speeds]
        for (one, slower), (other, faster) in product(found, found):
            if other.bandwidth >= one.bandwidth and other.latency <= one.latency:
                assert faster <= slower + 1e-12, (one, other)


def test_a_band_holds_all_its_ends():
    good, bad = settings_of(LINKS["pcie"], 132)
    assert bad.link.bandwidth < good.link.bandwidth and bad.slowdown == 132 / 130
    assert settings_of(LINKS["pcie"], None)[1].slowdown == 1
    fast, slow = Times(0.010, 0.020, 0.001), Times(0.012, 0.025, 0.001)
    found = predicted("DDP", 7, 8, (fast, slow), (good, bad), lambda t, s: WAYS["DDP"](t, 8, s), 32)
    for times, setting in product((fast, slow), (good, bad)):
        seconds = WAYS["DDP"](times, 8, setting)
        assert found.seconds.low <= seconds <= found.seconds.high
        assert found.efficiency.low <= times.step / seconds <= found.efficiency.high <= 1
        assert found.throughput.low <= 8 * 32 / seconds <= found.throughput.high
    assert predicted("DDP", 7, 8, None, (good, bad), WAYS["DDP"], 32).seconds is None


def footprint(**phases):
    parts = {phase: dict.fromkeys(KINDS, 0) | kinds for phase, kinds in phases.items()}
    by_phase = {phase: sum(kinds.values()) for phase, kinds in parts.items()}
    highest = max(by_phase, key=by_phase.get)
    return Footprint(by_phase[highest], highest, parts[highest], by_phase, parts)


STATES = {"parameters": 80, "optimizer": 160, "average": 80, "batch": 5}
FOUND = footprint(
    forward=STATES | {"gradients": 80, "activations": 100},
    backward=STATES | {"gradients": 60, "activations": 30, "temporary": 20},
    update=STATES | {"gradients": 80, "temporary": 120},
)
UNITS = [Unit(10, (10,), 0.0, False), *(Unit(size, (size,), 0.3, True) for size in (10, 20, 30)), Unit(10, (10,), 0.1, False)]


def test_memory_of_a_rank_by_hand():
    assert ddp_bytes(FOUND, UNITS) == FOUND.peak == 525  # which has all gradients already
    late = footprint(
        forward={"parameters": 80, "activations": 300},
        backward={"parameters": 80, "gradients": 10, "activations": 100},
        update={"parameters": 80, "gradients": 80},
    )
    assert (late.peak, ddp_bytes(late, UNITS)) == (380, 380 + 80)
    # Whole beside the shares: 20 outside of blocks, and two blocks, 50 at most; in the backward as much of gradients.
    forward = (80 + 160 + 80 + 80) // 4 + 5 + 100 + 70
    backward = (80 + 160 + 80 + 60) // 4 + 5 + 30 + 20 + 140
    update = (80 + 160 + 80 + 80 + 120) // 4 + 5
    assert (forward, backward, update) == (275, 290, 135)
    assert fsdp_bytes(FOUND, UNITS, 4) == 290
    assert fsdp_bytes(FOUND, UNITS, 8) < 290
    assert fsdp_bytes(FOUND, UNITS, 4, Unsharded(state=True)) == 290 + 160 - 160 // 4
    # On one device the update is the highest phase; shared out it is the forward, with what the update does not have.
    found = footprint(forward={"parameters": 80, "activations": 300}, backward={}, update={"parameters": 80, "temporary": 400})
    assert found.phase == "update"
    assert fsdp_bytes(found, UNITS, 8) == 10 + 300 + 70


@pytest.mark.parametrize("make", [adafactor, muon])
def test_the_bound_of_an_update_holds_where_shards_are_gathered(make):
    """The update of one rank of four, whose collectives do nothing, counted tensor by tensor."""

    def model():
        blocks = [ReversibleBlock(nn.Linear(192, 192), nn.Linear(192, 192)) for _ in range(4)]
        return nn.Sequential(*blocks, nn.Linear(192, 96))

    with fake_tensors():
        net = model()
        step = TrainingStep(net, lambda: None, make(net))
        update, entries = simulate_update(step), sum(p.nbytes for p in net.parameters())
        parts = {"parameters": entries, "gradients": entries, "optimizer": update.state, "temporary": update.beyond}
        whole, planned = Unsharded.of(step.optimizer), footprint(update=parts)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        net = model()
        fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
        step = TrainingStep(net, lambda: None, make(net))
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        step.update()
        states = [x for of in step.optimizer.state.values() for x in of.values()]
        held = [*net.parameters(), *(p.grad for p in net.parameters()), *states]
        with TrackedMemory(counted=map(local, held)) as tracked:
            step.update()
    finally:
        dist.destroy_process_group()
    bound = fsdp_bytes(planned, [], 4, whole)
    assert 0.85 * bound <= tracked.peak <= bound
    assert fsdp_bytes(planned, [], 4) < tracked.peak
