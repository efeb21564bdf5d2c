"""The chunked loss against torch's own of whole logits."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from holotrain.reversible.tiled_loss import linear_cross_entropy


def example(dtype, bias=True):
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 8, dtype=dtype), torch.randn(31, 8, dtype=dtype)
    targets = torch.randint(31, (23,))
    targets[[0, 5, 22]] = -100
    leaves = [hidden, weight] + ([torch.randn(31, dtype=dtype)] if bias else [])
    return [leaf.requires_grad_() for leaf in leaves], targets


@pytest.mark.parametrize("piece", [1, 31 * 4, 31 * 23, 10**6])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_whole_logits(piece, bias):
    (hidden, weight, *rest), targets = example(torch.float64, bias)
    loss = linear_cross_entropy(hidden, weight, targets, *rest, most_logits=piece)
    whole = F.cross_entropy(F.linear(hidden, weight, *rest), targets)
    torch.testing.assert_close(loss, whole, rtol=1e-13, atol=0)
    mine, theirs = (torch.autograd.grad(3 * each, (hidden, weight, *rest)) for each in (loss, whole))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_only_what_is_asked_for_is_differentiated():
    (hidden, weight, bias), targets = example(torch.float64)
    weight.requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, targets, bias)
    loss.backward()
    assert weight.grad is None and hidden.grad is not None and bias.grad is not None
    assert linear_cross_entropy(hidden, weight, torch.full((23,), -100), bias).isnan()  # nothing counted, as in torch
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, FlopCounterMode(display=False) as counter:
            torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, bias), loss.detach())
        assert counter.get_total_flops() == 2 * 23 * 31 * 8  # of the logits alone


def test_under_autocast_products_are_half_and_sums_are_not():
    (hidden, weight, bias), targets = example(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, bias, most_logits=31)
    assert loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    exact = F.cross_entropy(F.linear(hidden, weight, bias), targets)
    torch.testing.assert_close(loss, exact, rtol=2e-2, atol=0)
    reference = torch.autograd.grad(exact, (hidden, weight))
    for mine, theirs in zip((hidden.grad, weight.grad), reference, strict=True):
        assert F.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.999


def test_small_gradients_survive_half_precision():
    """Divided by the number of tokens before the products, they would be zero in fp16."""
    hidden = torch.randn(4096, 4, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(2000, 4, dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.long))
    scale = 2.0**16  # as a GradScaler has it
    (grad,) = torch.autograd.grad(loss * scale, weight)
    assert (grad[1:] != 0).float().mean() > 0.99


def test_logits_never_stand_whole():
    """Peak of tracked memory beside inputs and gradients, for 64 pieces against one."""
    hidden = torch.randn(512, 4, requires_grad=True)
    weight = torch.randn(4096, 4, requires_grad=True)
    targets = torch.zeros(512, dtype=torch.long)
    peaks = {}
    for name, piece in (("pieces", 8 * 4096), ("whole", 10**9)):
        tracker = MemTracker()
        tracker.track_external(hidden, weight, targets)
        with tracker:
            linear_cross_entropy(hidden, weight, targets, most_logits=piece).backward()
        hidden.grad = weight.grad = None
        peaks[name] = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    whole = 512 * 4096 * 4
    assert peaks["whole"] > whole
    assert peaks["pieces"] < whole / 10
