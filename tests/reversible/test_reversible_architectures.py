"""Tiny models of the architectures of transformers and timm train with rebuilt blocks as with stored ones."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import HUGGING_FACE, TIMM, made, tensors_in
from compared import assert_equal
from torch import Tensor, nn

from holotrain.reversible import make_reversible, stacks_in

ROWS = [row for table in (HUGGING_FACE, TIMM) for rows in table.values() for row in rows]
README = Path(__file__).parents[2] / "holotrain/reversible/README.md"

every_architecture = pytest.mark.parametrize("row", ROWS, ids=[f"{row.library}: {row.name}" for row in ROWS])


def run(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    return tensors_in(model(batch["x"]) if "x" in batch else model(**batch))


def gradients(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    model.train()
    for step in range(2):  # the first chooses the grid
        model.zero_grad()
        torch.manual_seed(step)
        sum(each.square().mean() for each in run(model, batch) if each.requires_grad).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@every_architecture
def test_gradients_equal_those_of_stored_blocks(row):
    model, batch = made(row)
    net = make_reversible(copy.deepcopy(model), row.blocks)
    blocks = sum(len(stack.blocks) for stack in stacks_in(net))
    assert blocks >= 3
    expected = gradients(make_reversible(copy.deepcopy(model), row.blocks, backward="autograd"), batch)
    assert len(expected) > 4 * blocks
    assert_equal(gradients(net, batch), expected)

    net, evaluated = make_reversible(copy.deepcopy(model), row.blocks).eval(), []
    for each in (net, model.eval()):
        torch.manual_seed(0)  # masked autoencoders draw in evaluation, too
        evaluated.append(run(each, batch))
    assert evaluated[1]
    assert_equal(*evaluated)
