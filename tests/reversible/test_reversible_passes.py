"""What a model may do with its blocks in one forward: leave out some, stop early, change the stream between two, run without
gradients, checkpoint them."""

import gc
import warnings
from itertools import product

import pytest
import torch
from compared import assert_equal
from covering import paired, pairwise
from small_stacks import Model, gradients, inputs, reversible
from torch import nn
from torch.utils.checkpoint import checkpoint

from holotrain.reversible import make_reversible, stack_of, undo
from holotrain.reversible.tape import Tape
from holotrain.reversible.two_step import weights

BACKWARDS = ["checkpoint", "reversible", "pareprop"]
MIXED = ["reversible", "checkpoint", "reversible", "reversible", "autograd", "reversible"]


class Dropping(Model):
    """Leaves out blocks: those of the next entry of ``plan`` in each forward, the last entry for ever."""

    def __init__(self, *plan):
        super().__init__()
        self.plan = list(plan)

    def blocks(self, x):
        without = self.plan.pop(0) if len(self.plan) > 1 else self.plan[0]
        for index, layer in enumerate(self.layers):
            x = x if index in without else layer(x)
        return x


DROPS = [(0,), (2,), (5,), (0, 1, 2), (3, 4, 5), (1, 3, 5), (0, 1, 2, 3, 4), tuple(range(6))]


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("without", "backward"), [*product(DROPS, ["reversible"]), *paired(DROPS, ["checkpoint", "pareprop", MIXED])]
)
def test_blocks_that_a_forward_leaves_out(without, backward, silent):
    net, plain = reversible(Dropping(without), backward), reversible(Dropping(without), "autograd")
    expected = gradients(plain)
    assert_equal(gradients(net), expected)
    assert len(expected) == 4 + 4 * (6 - len(without))
    assert stack_of(net.layers[0])._pass is None


def test_a_block_that_is_left_out_is_the_identity():
    """The blocks around it are coupled as if it was not there."""
    net = reversible(Dropping((2,)))
    fewer = Model(5)
    fewer.load_state_dict(
        {name.replace("layers.3", "layers.2"): value for name, value in net.state_dict().items()}, strict=False
    )
    for index in (2, 3, 4):
        fewer.layers[index].load_state_dict(net.layers[index + 1].state_dict())
    make_reversible(fewer)
    wide, narrow = stack_of(net.layers[0]), stack_of(fewer.layers[0])
    narrow.bits = [wide.bits[index - 1] for index in (1, 3, 4, 5)]
    narrow.weights = [wide.weights[index] for index in (0, 1, 3, 4, 5)]
    for step in range(2):
        torch.manual_seed(step)
        found = net(inputs())
        torch.manual_seed(step)
        assert_equal(fewer(inputs()), found)
        found.sum().backward()  # which ends the pass


@pytest.mark.parametrize("plan", [[(5,), (0,)], [(0, 1), (4, 5)], [(4, 5), ()], [(3, 4, 5), (0, 1, 2)], [(), (1,)]], ids=str)
def test_two_forwards_that_leave_out_others_before_one_backward(plan):
    def run(net):
        return torch.cat((net(inputs()), net(inputs(2)) * 2))

    found = {}
    for backward in ("autograd", "reversible"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[backward] = gradients(reversible(Dropping(*plan, *plan), backward), run=run)
    assert_equal(found["reversible"], found["autograd"])


def test_layers_dropped_at_random_are_no_changes_of_the_stream(silent):
    torch.manual_seed(0)
    plan = [tuple((torch.rand(6) < 0.3).nonzero().flatten().tolist()) for _ in range(30)]
    net = reversible(Dropping(*plan))
    gradients(net, steps=30)
    assert not stack_of(net.layers[0]).changed


def live_tapes():
    gc.collect()
    return sum(type(each) is Tape for each in gc.get_objects())


@pytest.mark.parametrize("backward", ["autograd", *BACKWARDS])
def test_a_forward_that_stops_early_goes_with_its_backward(backward):
    before = live_tapes()
    net = reversible(Dropping((3, 4, 5)), backward)
    gradients(net)
    assert stack_of(net.layers[0])._pass is None
    assert live_tapes() == before


def test_a_retained_graph_of_a_forward_that_stops_early():
    found = {}
    for backward in ("autograd", "reversible"):
        net = reversible(Dropping((4, 5)), backward)
        gradients(net)
        net.zero_grad()
        torch.manual_seed(3)
        loss = net(inputs()).sin().sum()
        loss.backward(retain_graph=True)
        with torch.inference_mode():
            loss.backward()
        found[backward] = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert_equal(found["reversible"], found["autograd"])


class Aside(nn.Module):
    """Returns a second tensor, of which alone the loss is taken."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return x + y, y * y


class AsideModel(Model):
    def blocks(self, x):
        for layer in self.layers[:3]:
            x, aside = layer(x)
        return aside


def test_a_backward_that_comes_by_another_tensor_of_the_last_block():
    expected = gradients(reversible(AsideModel(5, Aside), "autograd"))
    assert_equal(gradients(reversible(AsideModel(5, Aside))), expected)


class Changing(Model):
    """Changes its stream before some blocks."""

    def __init__(self, what, places=(3,), depth=6):
        super().__init__(depth)
        self.what, self.places = what, places

    def blocks(self, x):
        first = x
        for index, layer in enumerate(self.layers):
            if index in self.places:
                if self.what == "adds":
                    x = x + first
                elif self.what == "writes":
                    x.mul_(2)
                elif self.what == "repeats":
                    x = layer(x)
                elif self.what == "shortens":
                    x = x.unflatten(0, (1, -1)).flatten(0, 1)[1:, 1:]
                else:
                    x = x.unsqueeze(0) if x.dim() == 3 else x.squeeze(0)
            x = layer(x)
        return x.flatten(0, -3)


@pytest.mark.filterwarnings("ignore:the model changes the stream")
@pytest.mark.parametrize(
    ("what", "places", "backward"),
    pairwise(["adds", "writes", "repeats", "shortens", "unsqueezes"], [(3,), (1, 2, 5)], [*BACKWARDS, MIXED]),
)
def test_streams_that_the_model_changes_between_its_blocks(what, places, backward):
    if what == "shortens":
        places = places[:2]
    expected = gradients(reversible(Changing(what, places), "autograd"), steps=3)
    assert_equal(gradients(reversible(Changing(what, places), backward), steps=3), expected)


def test_a_changed_stream_is_warned_of_once_and_remembered(silent):
    net = reversible(Changing("adds", (2, 5)))
    with pytest.warns(
        UserWarning, match="changes the stream between block 1 and block 2, block 4 and block 5; there it is stored"
    ):
        gradients(net, steps=1)
    gradients(net)
    stack = stack_of(net.layers[0])
    assert stack.changed == {2, 5}
    runs = [stack.bits[:1], stack.bits[2:4], []]
    assert stack.weights == [pair for run in runs for pair in zip(weights(run, 1), weights(run, -1), strict=True)]
    resumed = reversible(Changing("adds", (2, 5)))
    stack_of(resumed.layers[0]).load_grid_state(stack.grid_state())
    assert_equal(gradients(resumed, steps=1), gradients(net, steps=1))


def test_a_hook_that_edits_what_a_block_returns():
    def steered(backward):
        net = reversible(Changing(None, ()), backward)
        steer = nn.Parameter(torch.full((8,), 0.1, dtype=torch.float64))
        net.layers[1].register_forward_hook(lambda module, inputs, output: output + steer)
        net.steer = steer
        return net

    with pytest.warns(UserWarning, match="between block 1 and block 2"):
        expected = gradients(steered("autograd"))
    with pytest.warns(UserWarning, match="between block 1 and block 2"):
        assert_equal(gradients(steered("reversible")), expected)
    assert "steer" in expected


def test_an_edit_in_place_that_comes_later():
    net = reversible(Changing("writes", ()))
    gradients(net)
    net.places = (3,)
    with pytest.raises(ValueError, match="in place between block 2 and block 3, .* it is from the next forward on"):
        net(inputs())
    plain = reversible(Changing("writes"), "autograd")
    stack_of(plain.layers[0]).load_grid_state(stack_of(net.layers[0]).grid_state())
    assert_equal(gradients(net), gradients(plain))


def test_training_without_gradients_runs_the_model_itself():
    """So that probabilities of unchanged weights have a ratio of one to those of a reference."""
    net = reversible(Model())
    gradients(net)
    expected = Model()(inputs())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_equal(net(inputs()), expected)
    assert (net(inputs()) - expected).abs().max() > 1e-6


@pytest.mark.parametrize("around", ["model", "block"])
def test_reentrant_checkpointing_is_refused(around):
    net = reversible(Model())
    x = inputs().requires_grad_()
    if around == "model":
        y = checkpoint(net, x, use_reentrant=True)
    else:
        y = net.stem(x)
        for layer in net.layers:
            y = checkpoint(layer, y, use_reentrant=True)
    with pytest.raises(ValueError, match=r"turn off gradient checkpointing, or use checkpoint\(..., use_reentrant=False\)"):
        y.sum().backward()


def test_checkpoints_around_single_blocks_are_refused():
    net = reversible(Model())
    y = net.stem(inputs())
    for layer in net.layers:
        y = checkpoint(layer, y, use_reentrant=False)
    with pytest.raises(ValueError, match="block 5 ran again in the backward without the blocks before it"):
        y.sum().backward()


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("without", [(), (2,), (4, 5)], ids=str)
def test_a_checkpoint_around_the_model(without, reference):
    """A reference without gradients may run between its forward and its backward."""

    def run(net, checkpointed):
        x = inputs().requires_grad_()
        y = checkpoint(net, x, use_reentrant=False) if checkpointed else net(x)
        if reference:
            with torch.no_grad():
                net(inputs())
        return y

    nets = [reversible(Dropping(without)) for _ in range(2)]
    found = []
    for checkpointed, net in enumerate(nets):
        gradients(net)
        found.append(gradients(net, run=lambda net, checkpointed=checkpointed: run(net, checkpointed)))
    assert_equal(*found)


def test_a_checkpoint_after_a_forward_that_stopped_early():
    """The second forward ends the first, which must not add to what the checkpoint saves."""

    def run(net, checkpointed):
        first, x = net(inputs()), inputs(2).requires_grad_()
        second = checkpoint(net, x, use_reentrant=False) if checkpointed else net(x)
        return torch.cat((first, second))

    found = []
    for checkpointed in (False, True):
        net = reversible(Dropping((), (4, 5), (), ()))
        gradients(net, steps=1)
        found.append(gradients(net, steps=1, run=lambda net, checkpointed=checkpointed: run(net, checkpointed)))
    assert_equal(*found)


def test_undo_after_a_forward_that_stopped_early():
    net = reversible(Dropping((4, 5)))
    loss = net(inputs()).sin().sum()
    undo(net)
    gc.collect()
    loss.backward()
    assert_equal(gradients(net), gradients(Dropping((4, 5))))
