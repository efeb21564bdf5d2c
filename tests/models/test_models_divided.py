"""A model as one rank of tensor parallelism has it: its sizes, its sums, its arithmetic, its memory."""

from collections import Counter
from functools import partial

import pytest
import torch
from small_models import IMAGE, POOLED, TEXT, WINDOWS, example
from torch.utils.flop_counter import FlopCounterMode

from holotrain.models import GPT, MViT, RevGPT, RevViT, Swin, ViT
from holotrain.models.division import TensorParallelError, divide, division
from holotrain.planning import TrainingStep
from holotrain.planning.training_step import simulate_step

BATCH, DIM, HIDDEN = 3, 16, 64
TOKENS = 16  # of 8 pixels, in patches of 2


def run(model, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(example("ViT", BATCH)).square().mean()
    loss.backward()


def sums_of(make=RevViT, autocast=False, **options):
    model = make(**IMAGE, **options)
    sums = divide(model, 2)
    run(model, autocast)
    return sums.jobs


def test_two_sums_a_block_there_and_two_back():
    jobs = sums_of(ViT)
    assert [job.covered for job in jobs] == [False] * 4 + [True] * 4
    assert {job.rows for job in jobs} == {BATCH * TOKENS} and {job.outputs for job in jobs} == {DIM}
    there, back = (Counter(job.inputs for job in jobs if job.covered == covered) for covered in (False, True))
    assert there == {DIM // 2: 2, HIDDEN // 2: 2}
    assert back == {3 * DIM // 2: 2, HIDDEN // 2: 2}
    assert jobs[0].message(jobs[0].rows) == BATCH * TOKENS * DIM * 4


def test_what_recomputes_sums_again():
    schedules = ("autograd", "reversible", "checkpoint")
    counts = {backward: Counter(job.covered for job in sums_of(backward=backward)) for backward in schedules}
    assert counts["autograd"] == {False: 4, True: 4}
    assert counts["reversible"] == {False: 8, True: 4}
    assert 4 < counts["checkpoint"][False] <= 8  # which stops where nothing more is needed: before a block's last product


def test_sums_are_of_the_precision_of_products():
    assert {job.dtype for job in sums_of(autocast=True)} == {torch.bfloat16}


@pytest.mark.parametrize("make", [ViT, RevViT])
def test_one_rank_is_the_whole_model(make):
    def footprint(ranks):
        model, images = make(**IMAGE), example("ViT", BATCH)
        if ranks is not None:
            divide(model, ranks)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        return simulate_step(TrainingStep(model, lambda: model(images).square().mean(), optimizer))

    assert footprint(1) == footprint(None)
    assert footprint(2).peak < footprint(1).peak


def test_products_and_parameters_of_blocks_are_shared_out_evenly():
    def counted(ranks):
        model = ViT(**IMAGE | {"dim": 64, "heads": 4})
        divide(model, ranks)
        with FlopCounterMode(display=False) as counter:
            run(model)
        matrices = sum(p.numel() for block in model.blocks.blocks for p in block.parameters() if p.dim() == 2)
        rest = [p.numel() for name, p in model.named_parameters() if not name.startswith("blocks")]
        return counter.get_total_flops(), matrices, sum(rest)

    whole, half, quarter = (counted(ranks) for ranks in (1, 2, 4))
    assert whole[1] == 2 * half[1] == 4 * quarter[1]
    assert whole[2] == half[2] == quarter[2]
    assert whole[0] - half[0] == 2 * (half[0] - quarter[0])


def test_frozen_layers_stay_frozen():
    model = GPT(**TEXT)
    model.blocks.blocks[0].requires_grad_(False)
    divide(model, 2)
    assert not any(parameter.requires_grad for parameter in model.blocks.blocks[0].parameters())
    assert all(parameter.requires_grad for parameter in model.blocks.blocks[1].parameters())


@pytest.mark.parametrize(
    ("make", "sizes", "ranks", "shared", "whole"),
    [
        (RevGPT, TEXT, 2, 4, []),
        (RevGPT, TEXT, 4, 2, ["2 heads (not divisible by 4)"]),
        (ViT, IMAGE | {"mlp_ratio": 0.7}, 2, 2, ["MLPs of width 11 (not divisible by 2)"]),
        (Swin, WINDOWS, 2, 3, ["attention in windows, or pooled"]),
        (MViT, POOLED, 2, 4, ["attention in windows, or pooled"]),
    ],
)
def test_what_cannot_be_shared_out_is_whole_and_says_why(make, sizes, ranks, shared, whole):
    found = division(make(**sizes), ranks)
    assert (len(found.layers), found.whole) == (shared, whole)
    model = make(**sizes)
    before = [parameter.numel() for parameter in model.parameters()]
    divide(model, ranks)
    changed = sum(a != b.numel() for a, b in zip(before, model.parameters(), strict=True))
    assert changed == 3 * len(found.layers)  # two matrices, and the bias of the first


@pytest.mark.parametrize(
    ("model", "ranks", "said"),
    [
        (partial(RevGPT, **TEXT), 3, r"2 heads \(not divisible by 3\); MLPs of width 64 \(not divisible by 3\)"),
        (partial(torch.nn.Linear, 2, 2), 2, "it has no such layers"),
    ],
)
def test_a_model_of_which_nothing_can_be_shared_out_says_why(model, ranks, said):
    with pytest.raises(TensorParallelError, match=said):
        divide(model(), ranks)
