"""Tiny models of the architectures of transformers and timm train with recomputed blocks as with stored ones."""

import copy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from compared import assert_equal
from covering import chosen
from reversible.architectures import HUGGING_FACE, TIMM, made, tensors_in
from torch import Tensor, nn

from holotrain.reversible import recompute
from holotrain.reversible.in_place import RecomputedForward
from holotrain.reversible.tiles import tile_modules

TABLES = {"transformers": HUGGING_FACE, "timm": TIMM}
ROWS = [row for table in TABLES.values() for rows in table.values() for row in rows]
README = Path(__file__).parents[2] / "holotrain" / "reversible" / "README.md"


def run(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    return tensors_in(model(batch["x"]) if "x" in batch else model(**batch))


def gradients(model: nn.Module, batch: dict[str, Any], mode: bool = True) -> dict[str, Tensor]:
    """Of all parameters, and the loss; ``mode``: of training."""
    model.train(mode).zero_grad()
    torch.manual_seed(0)
    numpy.random.seed(0)  # of which BigBird draws its blocks
    outputs = [each for each in run(model, batch) if each.requires_grad]
    loss = sum((each * torch.randn(each.shape, generator=torch.Generator().manual_seed(1))).mean() for each in outputs)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


BOUND, WITH_BATCH_NORMS, WORST = 0.06, 0.5, 0.2
"""Relative error of all gradients together, from inputs of 8 bits, and of one parameter. A batch norm divides by the deviation
of a few values, and rounding sends tokens to other experts."""

ROUTED = ("DBRX",)
"""Rounded inputs go to other experts, so that shapes differ, which is refused."""


def relative_error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    assert found.keys() == true.keys()
    errors = sum((found[name] - true[name]).square().sum() for name in true)
    return (errors / sum(each.square().sum() for each in true.values())).sqrt().item()


def worst_error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """That of one parameter, but for those with a ten-thousandth of all gradients."""
    least = 1e-4 * sum(each.square().sum() for each in true.values()).sqrt()
    return max(relative_error({"": found[name]}, {"": each}) for name, each in true.items() if each.norm() > least)


QUICK = ("GPT-2", "GPT-Neo", "Zamba2", "Switch", "BEiT")


CASES = chosen([(row,) for row in ROWS], lambda _, case: case[0].name in QUICK)


@pytest.mark.parametrize("row", CASES, ids=lambda row: f"{row.library} {row.name}")
def test_gradients_are_those_of_autograd(row):
    """Bit for bit, in tiles but for rounding, and from inputs of 8 bits within a bound. The forward is the same."""
    model, batch = made(row)
    net = recompute(copy.deepcopy(model), row.blocks)
    blocks = sum(RecomputedForward.of(part) is not None for part in net.modules())
    expected = gradients(model, batch)
    assert blocks >= 3 and len(expected) > 4 * blocks
    assert_equal(gradients(net, batch), expected)
    if row.name != "RWKV":  # which changes its weights in place in eval()
        whole = gradients(model, batch, mode=False)  # without dropout, of which each tile draws its own
        tile_modules(model, 5)
        assert relative_error(gradients(model, batch, mode=False), whole) < 1e-5
    recompute(net, row.blocks, backward="checkpoint8")
    if row.name in ROUTED:
        with pytest.raises(RuntimeError, match="it did something else"):
            gradients(net, batch)
        return
    found = gradients(net, batch)
    assert_equal(found.pop("loss"), expected.pop("loss"))
    has_batch_norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
    assert relative_error(found, expected) < (WITH_BATCH_NORMS if has_batch_norms else BOUND)
    if not has_batch_norms and not any("expert" in name for name in expected):
        assert worst_error(found, expected) < WORST


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
