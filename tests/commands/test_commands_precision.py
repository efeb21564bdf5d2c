"""The precision of float32 in a run, and what torch has set before and after it."""

import pytest
import torch

from holotrain.commands.multiprocess import matmul_precision

CUDNN, MATMUL = torch.backends.cudnn, torch.backends.cuda.matmul


def test_float32_is_as_asked_for_inside_and_as_before_afterwards():
    old = lambda: (torch.get_float32_matmul_precision(), CUDNN.allow_tf32, MATMUL.allow_tf32)  # noqa: E731
    before = old()
    for precision, in_tf32 in (("highest", False), ("high", True)):
        with matmul_precision(precision):
            assert old() == (precision, in_tf32, in_tf32)
    assert old() == before


def test_a_caller_may_have_used_torchs_newer_names():
    """torch refuses to read its older names then."""
    usual = MATMUL.fp32_precision, torch.get_float32_matmul_precision(), CUDNN.allow_tf32
    MATMUL.fp32_precision = "tf32" if usual[0] != "tf32" else "ieee"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        with matmul_precision("highest"):
            assert MATMUL.fp32_precision == "ieee"
    finally:
        MATMUL.fp32_precision = usual[0]
        torch.set_float32_matmul_precision(usual[1])
        CUDNN.allow_tf32 = usual[2]
