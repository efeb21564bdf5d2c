"""A plan against the tensors of a real step, PyTorch's own memory tracker, and what PyTorch's allocator reports.

The peak of a plan is the same on every machine, so it is compared with the tensors themselves. What the allocator reports
includes the scratch of kernels and libraries, which depends on the CPU.
"""

import pytest
import torch
from covering import slow
from small_planners import made
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from tracked_memory import check_plan

from holotrain import models
from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.fake_tensors import Unplannable, assume_mask_share, fake_tensors

CPU = torch.device("cpu")
aten = torch.ops.aten
VIT = {"image_size": 32, "patch_size": 4, "dim": 64, "depth": 2, "heads": 2, "classes": 10}
SWIN = {"image_size": 32, "patch_size": 2, "dim": 32, "depths": (2, 1), "heads": (1, 2), "window": 4, "classes": 10}
MVIT = {"image_size": 32, "dim": 24, "depths": (1, 2), "heads": 1, "classes": 10}
TEXT = {"vocab": 260, "context": 64, "dim": 64, "depth": 2, "heads": 4}
FAMILIES = {"ViT": VIT, "Swin": SWIN, "MViT": MVIT, "GPT": TEXT, "RoBERTa": TEXT}
FAMILIES |= {f"Rev{family}": sizes for family, sizes in FAMILIES.items()}


def half_precision_attention_runs() -> bool:
    """With ATEN_CPU_CAPABILITY=default on a CPU with AMX, PyTorch's own attention in bf16 ends in an error."""
    try:
        aten._scaled_dot_product_flash_attention_for_cpu(*(torch.ones(1, 1, 64, 64, dtype=torch.bfloat16),) * 3)
    except RuntimeError:
        return False
    return True


no_half = pytest.mark.skipif(
    not half_precision_attention_runs(), reason="PyTorch's attention does not run in bf16 with these settings of this CPU"
)

CASES = [  # each schedule and each family once, with the slow ones
    pytest.param("ViT", "checkpoint", True, marks=no_half),
    slow("RevViT", "pareprop", False),
    ("RevRoBERTa", "reversible", False),
    pytest.param("GPT", "autograd", True, marks=no_half),
    slow("Swin", "autograd", False),
    pytest.param("RevSwin", "reversible", True, marks=[no_half, pytest.mark.slow]),
    slow("MViT", "checkpoint", False),
    pytest.param("RevMViT", "autograd", True, marks=[no_half, pytest.mark.slow]),
    slow("RevGPT", "reversible", False),
    slow("RoBERTa", "checkpoint", False),
]


def training_step(family, backward, half=False, fake=False, batch=16):
    model = made(lambda: getattr(models, family)(**FAMILIES[family], backward=backward, drop_path=0.1), fake)
    text = FAMILIES[family] is TEXT
    given = torch.zeros(batch, 64, dtype=torch.int64) if text else torch.zeros(batch, 3, 32, 32)

    def loss():
        if family.endswith("GPT"):
            return model(given, given)
        if text:
            targets = torch.full((batch, 64), -100)
            targets[:, :16] = 1
            return model(given, torch.ones(batch, 64, dtype=torch.bool), targets)
        return nn.functional.cross_entropy(model(given), torch.zeros(batch, dtype=torch.int64))

    return TrainingStep(
        model=model,
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters()),
        autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=half),
        clip=1.0,
        held={"batch": [given]},
    )


@pytest.mark.parametrize(("family", "backward", "half"), CASES, ids=lambda of: {False: "fp32", True: "bf16"}.get(of, of))
def test_a_plan_is_what_the_tensors_take_and_the_allocator_keeps_within_its_bound(family, backward, half):
    with fake_tensors(), assume_mask_share(0.25):
        planned = simulate_step(training_step(family, backward, half, fake=True))
    check_plan(planned, training_step(family, backward, half))
    assert sum(planned.parts.values()) == planned.peak


@pytest.mark.parametrize("backward", ["reversible", slow("autograd")])
def test_a_plan_agrees_with_pytorchs_memory_tracker(backward):
    with fake_tensors():
        planned = simulate_step(training_step("RevViT", backward, fake=True))
        step = training_step("RevViT", backward, fake=True)
        tracker = MemTracker()
        step.begin()
        step.update()
        gradients = [parameter.grad for parameter in step.model.parameters()]
        tracker.track_external(step.model, step.optimizer, *step.held["batch"], *gradients)
        del gradients
        with tracker:
            step.differentiate()
            step.update()
    tracked = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert planned.peak == pytest.approx(tracked, rel=0.01)


def test_nothing_is_allocated_and_parts_are_what_they_are_called():
    with fake_tensors():
        step = training_step("RevViT", "reversible", fake=True)
        planned = simulate_step(step)
        weights = sum(p.nbytes for p in step.model.parameters())
        assert all(type(p.data).__name__ == "FakeTensor" for p in step.model.parameters())
    assert planned.parts["parameters"] == weights
    assert planned.parts["gradients"] <= weights
    assert 2 * weights <= planned.parts["optimizer"] <= 2.01 * weights
    assert planned.parts["batch"] == 16 * 3 * 32 * 32 * 4
    assert planned.phase in planned.by_phase and planned.peak == max(planned.by_phase.values())


@pytest.mark.parametrize(
    ("work", "operation"), [(lambda x: x * x.sum().item(), "_local_scalar_dense"), (torch.Tensor.unique, "unique")]
)
def test_what_cannot_be_planned_is_named(work, operation):
    with pytest.raises(Unplannable, match=operation), fake_tensors():
        work(torch.ones(3))
