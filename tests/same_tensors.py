"""Named tensors compared so that a failure says which of them differs, and by how much."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 0, atol: float = 0) -> None:
    """Every tensor of ``expected`` is in ``found``, bit for bit unless a tolerance is given."""
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda said, name=name: f"{name}: {said}")


def assert_same_parameters(found: nn.Module, expected: nn.Module) -> None:
    """Of two modules of the same kind."""
    assert_same(dict(found.named_parameters()), dict(expected.named_parameters()))
