"""Comparisons that say, when they fail, which entries differ and by how much."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def assert_equal(actual: Tensor | Iterable, expected: Tensor | Iterable) -> None:
    """Bit for bit: tensors, or iterables or mappings of them."""
    assert_close(actual, expected, rtol=0, atol=0)


def assert_close(actual: Tensor | Iterable, expected: Tensor | Iterable, rtol: float = 1e-5, atol: float = 1e-8) -> None:
    """With the tolerances of torch.allclose."""
    torch.testing.assert_close(_in_order(actual), _in_order(expected), rtol=rtol, atol=atol)


def assert_equal_parameters(actual: nn.Module, expected: nn.Module) -> None:
    """Bit for bit, for two modules of the same kind."""
    assert_equal(dict(actual.named_parameters()), dict(expected.named_parameters()))


def _in_order(given: Tensor | Iterable) -> Tensor | Mapping | list:
    return given if isinstance(given, Tensor | Mapping) else list(given)
