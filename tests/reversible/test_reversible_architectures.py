"""Tiny models of the architectures of transformers and timm train with rebuilt blocks as with stored ones."""

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from compared import assert_equal
from reversible.architectures import HUGGING_FACE, TIMM, made, tensors_in
from torch import Tensor, nn

from holotrain.reversible import make_reversible
from holotrain.reversible.stack import stacks_in

TABLES = {"transformers": HUGGING_FACE, "timm": TIMM}
ROWS = [row for table in TABLES.values() for rows in table.values() for row in rows]
README = Path(__file__).parents[2] / "holotrain" / "reversible" / "README.md"


def run(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    return tensors_in(model(batch["x"]) if "x" in batch else model(**batch))


def gradients(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    model.train()
    for step in range(2):  # the first chooses the grid
        model.zero_grad()
        torch.manual_seed(step)
        numpy.random.seed(step)  # of which BigBird draws its blocks
        sum(each.square().mean() for each in run(model, batch) if each.requires_grad).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


QUICK = ("GPT-2", "Llama", "GPT-Neo", "Zamba2", "BERT", "T5", "Switch", "DINOv2", "ConvNeXt", "EVA-02", "BEiT")
NO_WARNING = pytest.mark.filterwarnings("error:the model changes the stream")
EACH = 3
"""One of so many of the others is slow, the rest is long."""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=f"{row.library} {row.name}",
            marks=NO_WARNING if row.name in QUICK else pytest.mark.long if number % EACH else pytest.mark.slow,
        )
        for number, row in enumerate(ROWS)
    ],
)
def test_gradients_equal_those_of_stored_blocks(row):
    model, batch = made(row)
    net = make_reversible(copy.deepcopy(model), row.blocks)
    blocks = sum(len(stack.blocks) for stack in stacks_in(net))
    assert blocks >= 3
    expected = gradients(make_reversible(copy.deepcopy(model), row.blocks, backward="autograd"), batch)
    assert len(expected) > 4 * blocks
    assert_equal(gradients(net, batch), expected)
    errors = [error.item() for stack in stacks_in(net) for error in stack.checks.errors]
    assert errors and not any(errors)

    net, evaluated = make_reversible(copy.deepcopy(model), row.blocks).eval(), []
    for each in (net, model.eval()):
        torch.manual_seed(0)  # masked autoencoders draw in evaluation, too
        evaluated.append(run(each, batch))
    assert evaluated[1]
    assert_equal(*evaluated)


def test_the_readme_lists_them():
    text = README.read_text()
    assert f"small models of {len(ROWS)} architectures" in text
    lines = text.splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith(tuple(f"| {name} " for name in TABLES))
    ]
    listed = {(library.split()[0], kind): names.split(", ") for library, kind, names in cells}
    tables = {(library, kind): [row.name for row in rows] for library, table in TABLES.items() for kind, rows in table.items()}
    assert listed == tables
    assert all(len({*names}) == len(names) for names in tables.values())
