"""A step captured as a CUDA graph: every schedule, with random numbers that move on and repeat where they must.

test_order_of_streams.py captures steps on a GPU on paper.
"""

import ast
from pathlib import Path

import pytest
import torch
from compared import assert_close
from engine_branches import F64, WIDTH
from engine_cases import sequence

from holotrain.reversible.graphs import WARM_UPS, StepGraphs
from holotrain.schedules import OF_REVERSIBLE, REBUILDING

ROOT = Path(__file__).parents[2]


def step_of(backward, dropout, device="cuda"):
    net = sequence(4, dropout, backward=backward).to(device)

    def loss(x):
        y1, y2 = net(x, x.tanh())
        return (y1 * y2.sin()).mean()

    return net, loss, StepGraphs(loss, net)


def test_no_capture_forbids_other_threads_what_a_loader_does():
    """A thread that pins memory ends a capture in the mode that torch takes by default."""
    modes = []
    texts = [path.read_text() for path in (*ROOT.glob("holotrain/**/*.py"), *ROOT.glob("scripts/*.py"))]
    for text in texts:
        for call in ast.walk(ast.parse(text)) if "torch.cuda.graph" in text else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.cuda.graph":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                modes.append(options.get("capture_error_mode"))
    assert modes and set(modes) == {"'thread_local'"}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnCuda:
    @pytest.mark.parametrize("backward", OF_REVERSIBLE)
    def test_gradients_equal_an_ordinary_steps(self, backward):
        net, loss_of, step = step_of(backward, 0.0)
        for number in range(WARM_UPS + 4):
            x = torch.full((3, WIDTH), 0.1 * number, dtype=F64, device="cuda").cumsum(-1)
            net.zero_grad()
            loss = step(x)
            grads = [p.grad.clone() for p in net.parameters()]
            true = loss_of(x)
            reference = torch.autograd.grad(true, list(net.parameters()))
            assert_close(loss, true, rtol=1e-12)
            assert_close(grads, reference, rtol=1e-10, atol=1e-12)
            del true, reference  # a graph of another stream must not be alive in the capture
        other = torch.ones(5, WIDTH, dtype=F64, device="cuda")  # another shape: an ordinary step
        assert_close(step(other), loss_of(other))

    @pytest.mark.parametrize("backward", REBUILDING)
    def test_dropout_repeats_in_the_recomputation_and_moves_on_between_replays(self, backward):
        net, _, step = step_of(backward, 0.3)
        x = torch.linspace(-1, 1, 3 * WIDTH, dtype=F64, device="cuda").view(3, WIDTH)
        for _ in range(WARM_UPS):
            step(x)
        found = [(step(x).item(), net.checks.errors[0].item()) for _ in range(5)]
        assert len({loss for loss, _ in found}) == 5
        assert max(drift for _, drift in found) <= 1e-12  # with other masks the rebuilt input would be far off

    def test_capturing_without_it_is_refused(self):
        _, loss, _ = step_of("reversible", 0.3)
        x = torch.zeros(2, WIDTH, dtype=F64, device="cuda")
        loss(x).backward()
        with pytest.raises(RuntimeError, match="StepGraphs"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            loss(x)
