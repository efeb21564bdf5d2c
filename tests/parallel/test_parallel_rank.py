"""Rank and size of a process, from the variables of its launcher; and which layers are split among processes."""

import os

import pytest
from small_models import IMAGE, POOLED, TEXT

from holotrain.errors import UserError
from holotrain.models import MViT, RevGPT, ViT
from holotrain.parallel.rank import ProcessRank, rank_from_environment
from holotrain.parallel.strategies import division

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture
def rank_of(monkeypatch):
    """The rank from environment variables, which it may add to."""

    def rank_of(variables: dict[str, str]) -> ProcessRank | None:
        monkeypatch.setattr(os, "environ", variables)
        return rank_from_environment()

    return rank_of


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ProcessRank(5, 8, 1, 4)),
        (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, ProcessRank(5, 8, 1, 4)),  # srun started torchrun
        ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}, ProcessRank(5, 8, 1, 8)),
        (TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"LOCAL_RANK": "0"}, None),  # left by a Trainer
        ({}, None),
    ],
)
def test_rank(rank_of, variables, expected):
    assert rank_of(dict(variables)) == expected


@pytest.mark.parametrize(
    ("variables", "refusal"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "each machine must have the same number"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "srun started 4 processes, .* let it start torchrun"),
    ],
)
def test_processes_that_cannot_work_together_are_refused(rank_of, variables, refusal):
    with pytest.raises(UserError, match=refusal):
        rank_of(dict(variables))


@pytest.mark.parametrize(
    ("make", "sizes", "ranks", "split", "whole"),
    [
        (RevGPT, TEXT, 4, 2, ["2 heads (not divisible by 4)"]),
        (ViT, IMAGE | {"mlp_ratio": 0.7}, 2, 2, ["MLPs of width 11 (not divisible by 2)"]),
        (MViT, POOLED, 2, 4, ["attention in windows, or pooled"]),
    ],
)
def test_layers_that_cannot_be_split_are_whole(make, sizes, ranks, split, whole):
    found = division(make(**sizes), ranks)
    assert (len(found.layers), found.whole) == (split, whole)
