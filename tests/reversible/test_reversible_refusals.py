"""What cannot be right is refused, by name, at the first forward or in the backward."""

import pytest
import torch
from torch import nn

from holotrain.reversible import ReversibleBlock, ReversibleSequence

SCHEDULES = ["autograd", "checkpoint", "reversible", "pareprop"]
RECOMPUTING = ["checkpoint", "reversible", "pareprop"]
WIDTH = 4


class Narrowing(nn.Module):
    def forward(self, x):
        return x[..., :1]


class Doubling(nn.Module):
    def forward(self, x):
        return x.double()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, bias=0.0, log=None, module=None):
        if log is not None:
            log.append(x.mean())
        return self.linear(x) + bias


def sequence(f=Scaled, g=Scaled, depth=2, backward="reversible") -> ReversibleSequence:
    return ReversibleSequence([ReversibleBlock(f(), g()) for _ in range(depth)], backward)


def streams():
    return torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH)


@pytest.mark.parametrize("backward", SCHEDULES)
@pytest.mark.parametrize(
    ("f", "words"), [(Narrowing, "preserve the shape"), (Doubling, "dtype"), (lambda: nn.LSTM(4, 4), "return one tensor")]
)
def test_a_branch_that_changes_shape_or_dtype(f, words, backward):
    with pytest.raises(ValueError, match=words):
        sequence(f, nn.Identity, backward=backward)(*streams())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"backward": "revresible"}, ValueError, "autograd, checkpoint, checkpoint8, offload, reversible, pareprop"),
        ({"backward": None}, ValueError, "or a list of them, not None"),
        ({"store": 3}, ValueError, "up to 2"),
        ({"store": -1}, ValueError, "up to 2"),
        ({"store": True}, ValueError, "not True"),
        ({"store": [0, 2]}, ValueError, "indices below 2"),
        ({"keep": ["atention"]}, ValueError, "attention"),
        ({"keep": ["aten.mm"]}, ValueError, "aten.mm.default"),
        ({"keep": ["aten.view.default"]}, ValueError, "changes or returns its input"),
        ({"keep": ["aten.relu_.default"]}, ValueError, "changes or returns its input"),
        ({"keep": ["aten.linear.default"]}, ValueError, "not made of others"),
        ({"keep": ["aten._to_copy.default"]}, ValueError, "autocast"),
        ({"keep": ["aten.native_dropout.default"]}, ValueError, "draw no random numbers"),
        ({"exact": "yes"}, ValueError, "exact must be"),
        ({"exact": -3}, ValueError, "exact must be"),
    ],
)
def test_options(options, error, words):
    with pytest.raises(error, match=words):
        ReversibleSequence(sequence().blocks, **options)


def test_a_grid_is_not_added_later():
    net = sequence()
    with pytest.raises(AttributeError, match="exact"):
        net.exact = True
    assert net.exact is False


def test_arguments_that_are_no_keyword_arguments():
    with pytest.raises(TypeError, match="one dict for each block, not 3"):
        sequence()(*streams(), f_kwargs=3)


def test_a_branch_that_is_no_module():
    with pytest.raises(TypeError, match="must be modules, not a builtin_function_or_method"):
        ReversibleBlock(torch.tanh, Scaled())


def test_blocks_of_another_kind():
    with pytest.raises(TypeError, match="must be ReversibleBlocks, not Linear"):
        ReversibleSequence([nn.Linear(4, 4)])

    class Other(ReversibleBlock):
        def forward(self, x1, x2, **keywords):
            return x2, x1

    with pytest.raises(TypeError, match="overrides forward"):
        ReversibleSequence([Other(Scaled(), Scaled())])


@pytest.mark.parametrize(
    ("x1", "x2"),
    [(torch.zeros(2, 4), torch.zeros(3, 4)), (torch.zeros(2, 4), torch.zeros(2, 4).double()), (torch.zeros(2, 4).int(),) * 2],
)
def test_streams_that_do_not_match(x1, x2):
    with pytest.raises(ValueError, match="same shape"):
        sequence()(x1, x2)


@pytest.mark.parametrize("backward", ["reversible", "pareprop"])  # the inputs that a checkpoint stores are others
def test_an_output_edited_before_the_backward(backward):
    y1, y2 = sequence(backward=backward)(*streams())
    y1.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y1 * y2).sum().backward()


def test_a_branch_that_edits_its_input():
    with pytest.raises(ValueError, match="changed its input in place"):
        sequence(lambda: nn.ReLU(inplace=True))(torch.randn(3, WIDTH, requires_grad=True) * 1, torch.randn(3, WIDTH))


def test_a_branch_that_reports_through_its_keywords():
    with pytest.raises(ValueError, match="changed a list or dict among its keyword arguments"):
        sequence()(*streams(), f_kwargs={"log": []})


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_changes_a_blocks_streams(hook):
    net = sequence()
    if hook == "register_forward_hook":
        net.blocks[0].register_forward_hook(lambda module, inputs, output: (output[0] * 2, output[1]))
    else:
        net.blocks[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2, *inputs[1:]))
    with pytest.raises(ValueError, match="replaced the inputs or outputs of a ReversibleBlock"):
        net(*streams())


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_edits_a_blocks_streams_in_place(hook):
    net = sequence()

    def edit(module, inputs, output=None):
        with torch.no_grad():
            (inputs if output is None else output)[1].mul_(2)

    getattr(net.blocks[1], hook)(edit)
    with pytest.raises(ValueError, match="inputs or outputs of a ReversibleBlock in place"):
        net(*streams())


@pytest.mark.parametrize("backward", RECOMPUTING)
def test_switching_to_evaluation_before_the_backward(backward):
    net = sequence(backward=backward)
    loss = sum(net(*streams())).sum()
    net.eval()
    with pytest.raises(RuntimeError, match="switch after the backward"):
        loss.backward()


def test_half_precision_streams_are_warned_of():
    net = sequence().bfloat16()
    with pytest.warns(UserWarning, match="streams of torch.bfloat16"):
        net(*(stream.bfloat16() for stream in streams()))


def test_keeping_results_of_compiled_branches():
    net = ReversibleSequence(sequence().blocks, keep=["attention"])
    net.blocks[0].f.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled branches"):
        net(*streams())
