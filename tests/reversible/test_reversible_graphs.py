"""A step captured as a CUDA graph: every schedule, with random numbers that move on and repeat where they must."""

import ast
from pathlib import Path

import pytest
import torch
from compared import assert_close
from torch import nn

from holotrain.reversible import GraphedStep, ReversibleBlock, ReversibleSequence
from holotrain.reversible.graphs import WARM_UPS

WIDTH = 16
ROOT = Path(__file__).parents[2]
SCHEDULES = ["autograd", "checkpoint", "reversible", "pareprop"]
needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class Model(nn.Module):
    def __init__(self, backward, dropout):
        super().__init__()
        torch.manual_seed(0)

        def branch():
            layers = nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH), nn.Dropout(dropout)
            return nn.Sequential(*layers)

        self.sequence = ReversibleSequence([ReversibleBlock(branch(), branch()) for _ in range(4)], backward)

    def forward(self, x):
        y1, y2 = self.sequence(x, x.tanh())
        return (y1 * y2.sin()).mean()


def test_tensors_off_the_gpu_are_refused():
    model = Model("reversible", 0.0)
    with pytest.raises(ValueError, match="CUDA device"):
        GraphedStep(model, model.parameters())(torch.zeros(2, WIDTH))


def test_no_capture_forbids_other_threads_what_a_loader_does():
    """A thread that pins memory ends a capture in the mode that torch takes by default."""
    modes = []
    for path in [*ROOT.glob("holotrain/**/*.py"), *ROOT.glob("scripts/*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.cuda.graph":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                modes.append(options.get("capture_error_mode"))
    assert modes and set(modes) == {"'thread_local'"}


class TestOnCuda:
    pytestmark = needs_cuda

    @pytest.mark.parametrize("backward", SCHEDULES)
    def test_gradients_equal_an_ordinary_steps(self, backward):
        model = Model(backward, 0.0).double().cuda()
        step = GraphedStep(model, model.parameters())
        for number in range(WARM_UPS + 4):
            x = torch.full((3, WIDTH), 0.1 * number, dtype=torch.float64, device="cuda").cumsum(-1)
            loss = step(x)
            grads = [p.grad.clone() for p in model.parameters()]
            true = model(x)
            reference = torch.autograd.grad(true, list(model.parameters()))
            assert_close(loss, true, rtol=1e-12)
            assert_close(grads, reference, rtol=1e-10, atol=1e-12)
            del true, reference  # a graph of another stream must not be alive in the capture
        other = torch.ones(5, WIDTH, dtype=torch.float64, device="cuda")  # another shape: an ordinary step
        assert_close(step(other), model(other))

    @pytest.mark.parametrize("backward", ["reversible", "pareprop"])
    def test_dropout_repeats_in_the_recomputation_and_moves_on_between_replays(self, backward):
        model = Model(backward, 0.3).double().cuda()
        step = GraphedStep(model, model.parameters())
        x = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64, device="cuda").view(3, WIDTH)
        for _ in range(WARM_UPS):
            step(x)
        losses, drifts = [], []
        for _ in range(5):
            losses.append(step(x).item())
            drifts.append(model.sequence.checks.errors[0].item())
        assert len(set(losses)) == 5
        assert max(drifts) <= 1e-12  # with other masks the rebuilt input would be far off

    def test_capturing_without_it_is_refused(self):
        model = Model("reversible", 0.3).cuda()
        x = torch.zeros(2, WIDTH, device="cuda")
        model(x).backward()
        with pytest.raises(RuntimeError, match="GraphedStep"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)
